"""The plans in docs/scale.md: brought up to date, and its arithmetic done again by hand."""

from __future__ import annotations

import runpy
from typing import Any

import pytest

from tests.project.docs_sandbox import PROJECT

SCRIPT = PROJECT / "scripts" / "scale_plans.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_page_is_up_to_date(script: dict[str, Any]) -> None:
    """Figures of an earlier model or assumption; `scripts/scale_plans.py` renews the page."""
    page = (PROJECT / "docs" / "scale.md").read_text(encoding="utf-8")
    assert script["render"](page, script["Assumptions"]()) == page
    assert page.count("<!-- table:") == len(script["tables"](script["Assumptions"]())) == 3


def test_every_assumption_is_named(script: dict[str, Any]) -> None:
    page = (PROJECT / "docs" / "scale.md").read_text(encoding="utf-8")
    for name in script["MEANING"]:
        assert f"| `--{name}` |" in page


def test_a_plan_by_hand(script: dict[str, Any]) -> None:
    """The base model on one node: parameters, FLOPs, time and cost, on paper."""
    assumed = script["Assumptions"](
        peak=1e12, small=0.5, price=3.0, launch=0.0, length=20, padding=0.1, inside=1e10
    )
    plan = script["plans"](assumed)[0]
    d, f, v, layers, length = 512, 2048, 37000, 6, 20
    square, block = d * d, 2 * d * f
    encoder = 4 * square + block + 4 * d + f + d + 4 * d
    decoder = 8 * square + block + 8 * d + f + d + 6 * d
    parameters = layers * (encoder + decoder) + v * d
    assert plan.sizes.total == parameters
    products = layers * ((4 * square + block) + (8 * square + block)) + v * d
    attention = 3 * layers * 2 * length * d  # scores and contexts of three attentions
    flops = 6 * (products + attention)
    assert plan.flops_per_token == flops
    tokens = 8 * 3200 * 0.9
    assert plan.tokens_per_update == pytest.approx(tokens)
    seconds = tokens * flops / (8 * 1e12 * 0.5)
    assert plan.compute == pytest.approx(seconds)
    exchange = 2 * 7 / 8 * 4 * parameters / 1e10
    assert plan.exchange == pytest.approx(exchange) and exchange < 2 / 3 * seconds
    assert plan.updates == pytest.approx(100_000)
    assert plan.hours == pytest.approx(100_000 * seconds / 3600)
    assert plan.cost == pytest.approx(100_000 * seconds / 3600 * 8 * 3.0)
    assert plan.memory.weights == 4 * parameters and plan.memory.moments >= 8 * parameters
    slow = script["plans"](script["Assumptions"](launch=100.0))[4]  # four batches an update
    assert slow.seconds == 400.0
    shared = script["plans"](script["Assumptions"](inside=1e10))[6]  # four batches an update
    # `fully_shard` gathers float32, twice, and scatters float32; the page had 2 bytes of weights.
    travels = 7 / 8 * 4 * 3 * 4 * shared.sizes.total
    assert shared.sharded and shared.exchange == pytest.approx(travels / 1e10)
    network = script["plans"](script["Assumptions"](between=1.0, launch=0.0))[1]
    hidden = 2 / 3 * network.compute
    assert network.seconds == pytest.approx(network.compute + network.exchange - hidden)


def test_other_assumptions_from_the_command_line(
    script: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twice the price, twice the cost; the page holds the default ones alone."""
    costs = []
    for price in ("50", "100"):
        monkeypatch.setattr("sys.argv", ["scale_plans.py", "--show", "--price", price])
        assert script["main"]() == 0
        shown = [line.split("$")[1] for line in capsys.readouterr().out.splitlines() if "$" in line]
        costs.append([int(cost.strip("| ").replace(",", "")) for cost in shown])
    assert len(costs[0]) == 8
    for once, twice in zip(*costs, strict=True):
        assert twice == pytest.approx(2 * once, abs=2)
    monkeypatch.setattr("sys.argv", ["scale_plans.py", "--price", "100"])
    with pytest.raises(SystemExit) as refused:
        script["main"]()
    assert refused.value.code == 2 and "--show" in capsys.readouterr().err
