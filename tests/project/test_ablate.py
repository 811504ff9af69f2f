"""The ablation script: its figures against arithmetic, its plan, and a small run of it."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mttrain.config import dump_config
from mttrain.runlog import read_log
from tests.integration.training_help import (
    random_sentences,
    tiny_config,
    wait_for_updates,
    write_pairs,
)

PROJECT = Path(__file__).resolve().parents[2]
SCRIPTS = PROJECT / "scripts"
sys.path.insert(0, str(SCRIPTS))

import ablate  # noqa: E402
import ablate_plan  # noqa: E402
import ablate_table  # noqa: E402

DEMO = PROJECT / "configs" / "demo.yaml"


# ---- figures ----------------------------------------------------------------------------------


def made_up_log(bleu: float = 6.0) -> list[dict[str, Any]]:
    """Ten updates of 20 pairs in 4 seconds; a validation after the 5th and one after the 10th."""
    losses = [9.0, 8.0, 7.0, 6.0, 5.0, 5.0, 4.0, 6.0, 5.0, 5.0]
    norms = [6.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 5.0, 5.1, 1.0]
    train = [
        {"kind": "train", "step": i + 1, "nll": losses[i], "loss": 99.0, "grad_norm": norms[i]}
        | {"seconds": 0.4 * (i + 1), "target_tokens": 100}
        for i in range(10)
    ]
    valid = [
        {"kind": "valid", "step": step, "bleu": value, "nll": nll, "target_tokens": 50}
        | {"signatures": ["tok:13a"]}
        for step, value, nll in ((5, 5.0, 4.0), (10, bleu, 2.0))
    ]
    candidates = [
        {"name": "step-00000010", "scores": {"bleu": bleu + 1, "chrf": 30.0, "nll": 2.0}},
        {"name": "average", "scores": {"bleu": bleu + 3, "chrf": 31.0, "nll": 2.1}},
        {"name": "ema", "scores": {"bleu": bleu, "chrf": 29.0, "nll": 2.2}},
    ]
    texts = [
        {"split": "training", "pairs": 200, "kept": 190},
        {"split": "validation", "pairs": 9, "kept": 9},
    ]
    return [
        {"kind": "corpus", "step": 0, "splits": texts},
        {"kind": "encoded", "step": 0, "pairs": 190},
        {"kind": "begin", "step": 0, "parameters": 1234, "config": {"train": {"batch_size": 20}}},
        *train[:5], valid[0], *train[5:], valid[1],
        {"kind": "candidates", "step": 10, "beam": 2, "length_penalty": 0.5, "best": "average",
         "candidates": candidates},
        {"kind": "end", "step": 10, "seconds": 4.0},
    ]  # fmt: skip


def test_figures_of_a_log() -> None:
    """Stops a figure from another record: the first validation, the smoothed loss, the losing
    candidate, the seconds of the loop; and an error of a factor."""
    found = ablate_table.read_figures(made_up_log(), characters=80, settled=5)
    assert found.finished and found.updates == 10
    assert (found.parameters, found.pairs) == (1234, 190)
    assert (found.greedy, found.bleu, found.chrf, found.best) == (6.0, 9.0, 31.0, "average")
    assert found.candidates["single"]["bleu"] == 7.0
    assert found.nats_per_token == 2.0
    # 50 tokens of 2 nats on 80 characters
    assert found.bits_per_character == pytest.approx(2.0 * 50 / 80 / math.log(2))
    assert (found.seconds, found.pairs_per_second) == (4.0, pytest.approx(50.0))
    # updates 6 to 10: 5 4 6 5 5, mean 5; changes 1 2 1 0
    assert found.mean_change == pytest.approx(20.0)
    assert found.largest_change == pytest.approx(40.0)
    assert found.high_norms == 2  # 6 and 5.1 are above 5 medians of 1; 5 is not
    assert [found.reached(bleu) for bleu in (5.0, 5.5, 6.5)] == [5, 10, None]
    assert found.how == "beam 2, length penalty 0.5; tok:13a"


def test_changes_are_between_neighbours() -> None:
    """Stops an update that was left out from making a change of two steps."""
    train = [{"step": step, "nll": nll} for step, nll in ((1, 1.0), (2, 2.0), (4, 9.0), (5, 8.0))]
    mean, most = ablate_table.loss_changes(train, 0)
    assert (mean, most) == (pytest.approx(20.0), pytest.approx(20.0))  # 1 and 1, of a mean of 5
    assert ablate_table.loss_changes(train, 4) == (None, None)


def test_unfinished_run_has_no_result() -> None:
    """Stops the scores of a run that was cut short, or of one that goes on, from being compared."""
    records = [record for record in made_up_log() if record["kind"] != "end"]
    found = ablate_table.read_figures(records, characters=80, settled=5)
    assert not found.finished and found.updates == 10 and found.seconds == pytest.approx(4.0)
    assert (found.greedy, found.bleu, found.nats_per_token, found.bits_per_character) == (None,) * 4
    assert found.reached(5.0) == 5
    assert ablate_table.read_figures([], characters=80, settled=5) == ablate_table.Figures()


def test_likelihood_of_other_pairs_is_not_shared_out() -> None:
    """Stops bits per character that count the characters of pairs that were too long to score."""
    records = made_up_log()
    records[0]["splits"][1]["kept"] = 8
    found = ablate_table.read_figures(records, characters=80, settled=5)
    assert found.bits_per_character is None and found.nats_per_token == 2.0


def cells(text: str, name: str) -> list[str]:
    """The row that begins with `name`, in the first Markdown table that has one."""
    line = next(line for line in text.splitlines() if line.startswith(f"| {name} "))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_tables_compare_with_the_mean_of_the_base() -> None:
    """Stops a difference to one seed, the deviation of a population (0.82), a turned sign."""
    seeds = [ablate_table.read_figures(made_up_log(b), 80, 5) for b in (17.0, 18.0, 19.0)]
    base = ablate_table.Row("base", "", seeds)
    worse = ablate_table.read_figures(made_up_log(16.5), 80, 5)
    text = ablate_table.quality(base, [ablate_table.Row("worse", "", [worse])])
    bits = f"{100 / 80 / math.log(2):.4f}"
    # fmt: off
    assert cells(text, "base") == [
        "base", "1,234", "18.00 ± 1.00", "21.00 ± 1.00", "31.00", "-", "-", "2.000", bits,
        "5 / 10 / 10",
    ]
    assert cells(text, "worse") == [
        "worse", "1,234", "16.50", "19.50", "31.00", "-1.50", "-1.5", "2.000", bits, "5 / 10 / 10",
    ]
    # fmt: on
    assert "beam 2, length penalty 0.5; tok:13a" in text
    text = ablate_table.steadiness(base, [])
    assert cells(text, "base") == ["base", "10", "4", "50.0", "20.00", "40.0", "2"]
    text = ablate_table.averages({"base-1": seeds[0], "base-2": worse})
    assert cells(text, "base-1") == ["base-1", "18.00", "20.00", "17.00"]
    assert cells(text, "mean difference") == ["mean difference", "", "+2.00", "-1.00"]


def test_one_seed_has_no_deviation() -> None:
    """Stops a difference in units of nothing."""
    run = ablate_table.read_figures(made_up_log(), 80, 5)
    base = ablate_table.Row("base", "", [run])
    text = ablate_table.quality(base, [ablate_table.Row("same", "", [run])])
    assert cells(text, "base")[2:4] == ["6.00", "9.00"]
    assert cells(text, "same")[5:7] == ["+0.00", "-"]


# ---- the plan ---------------------------------------------------------------------------------


def plan_of(*words: str | Path) -> ablate_plan.Plan:
    return ablate_plan.Plan(ablate.parser().parse_args([str(word) for word in words]))


def test_every_variant_fits_a_shipped_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stops a variant that no run can be made of, one that is the base under another name, and a
    run of another length or with a test set."""
    monkeypatch.chdir(PROJECT)
    plan = plan_of("--config", DEMO, "--runs", tmp_path, "--steps", 400, "--batch-size", 32)
    assert plan.refused == {}
    assert "heads-4" in plan.same  # what the configuration has is not trained again
    names = [run.name for run in plan.others]
    assert sorted([*names, *plan.same]) == sorted(v.name for v in ablate_plan.VARIANTS)
    assert [run.config.seed for run in plan.base] == [1, 2, 3]
    for run in plan.runs:
        config = run.config
        assert config.data.test is None
        assert (config.train.max_steps, config.train.batch_size) == (400, 32)
        assert config.run_dir == str(tmp_path / run.name)
    configs = [run.config.model_copy(update={"run_dir": "x"}).model_dump() for run in plan.runs]
    assert all(config not in configs[:i] for i, config in enumerate(configs))


def test_names_are_clear(tmp_path: Path) -> None:
    """Stops a name for two things in --only, or for two folders."""
    names = [variant.name for variant in ablate_plan.VARIANTS]
    assert len(names) == len(set(names)) and not set(names) & {*ablate_plan.CLAIMS, "cache"}
    assert {v.group for v in ablate_plan.VARIANTS} | {"base"} == set(ablate_plan.CLAIMS)


def test_list_shows_all(capsys: pytest.CaptureFixture[str]) -> None:
    """Stops a variant, or what it asks, from being left out of the list."""
    assert ablate.main(["--list"]) == 0
    text = capsys.readouterr().out
    for variant in ablate_plan.VARIANTS:
        assert cells(text, variant.name)[1:] == [variant.group, " ".join(variant.settings)]
    for group in {variant.group for variant in ablate_plan.VARIANTS}:
        assert ablate_plan.CLAIMS[group] in text
    assert ablate.main(["--list", "--only", "tie", "heads-1"]) == 0
    text = capsys.readouterr().out
    assert cells(text, "tie-none") and cells(text, "heads-1") and "heads-8" not in text


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Stops a slip in a name from training everything else, or nothing."""
    assert ablate.main(["--only", "heads-1", "heads-9"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: --only: no variant or group heads-9.")


@pytest.mark.parametrize(
    "words",
    [["--table", "--jobs", "2"], ["--list", "--json", "x"], ["--steps", "0"]],
)
def test_options_without_effect_are_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Stops an option that does nothing, and a run of no updates."""
    with pytest.raises(SystemExit) as error:
        ablate.main(words)
    assert error.value.code == 2 and "error: " in capsys.readouterr().err


# ---- runs -------------------------------------------------------------------------------------


def tiny_yaml(folder: Path, **sections: dict[str, Any]) -> Path:
    """A configuration file with texts beside it, the test set among them."""
    lines = random_sentences(40, seed=5)
    parts = {"train": lines, "valid": lines[:6], "test": lines[6:9]}
    texts = {
        name: write_pairs(folder, name, [(line, line) for line in part])
        for name, part in parts.items()
    }
    path = folder / "run.yaml"
    path.write_text(dump_config(tiny_config(folder, texts, **sections)), encoding="utf-8")
    return path


def words(config: Path, runs: Path, *more: str) -> list[str]:
    start = ["--config", str(config), "--runs", str(runs), "--batch-size", "10", "--seeds", "1"]
    return [*start, *more]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any]]:
    """Base and one variant after six updates: configuration, folder of the runs, the JSON."""
    folder = tmp_path_factory.mktemp("ablation")
    config, runs, figures = tiny_yaml(folder), folder / "runs", folder / "figures.json"
    more = ["--steps", "6", "--only", "heads-1", "--jobs", "2", "--threads", "1"]
    assert ablate.main(words(config, runs, *more, "--json", str(figures))) == 0
    return config, runs, json.loads(figures.read_text(encoding="utf-8"))


def test_runs_are_trained_and_judged_alike(done: tuple[Path, Path, dict[str, Any]]) -> None:
    """Stops a run from other settings than the plan's, and figures that are not those of its log.
    The test set must not be looked at, and the states that nothing needs must not fill the disk."""
    _, runs, figures = done
    assert sorted(figures["runs"]) == ["base-1", "heads-1"]
    for name, found in figures["runs"].items():
        records = read_log(runs / name / "log.jsonl")
        kinds = [record["kind"] for record in records]
        assert kinds.count("train") == 6 and kinds[-1] == "end" and "test" not in kinds
        begin = next(record for record in records if record["kind"] == "begin")
        assert begin["config"]["model"]["num_heads"] == (1 if name == "heads-1" else 4)
        assert begin["threads"] == 1
        (scored,) = (record for record in records if record["kind"] == "candidates")
        assert {ablate_table._kind(c["name"]) for c in scored["candidates"]} == {
            "single", "average", "ema",
        }  # fmt: skip
        best = next(c for c in scored["candidates"] if c["name"] == scored["best"])
        assert found["bleu"] == best["scores"]["bleu"] and found["status"] == "finished"
        assert list((runs / name / "checkpoints").glob("*/model.safetensors"))
        assert not list((runs / name / "checkpoints").glob("*/training.*"))


def test_second_call_trains_nothing(
    done: tuple[Path, Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Stops finished runs from being trained again, by the same command or by --table."""
    config, runs, figures = done
    before = {path: path.read_bytes() for path in [*runs.glob("*/log.jsonl"), *runs.glob("*.txt")]}
    assert len(before) == 4
    outputs = []
    for more in ([], ["--table"]):
        assert ablate.main(words(config, runs, "--steps", "6", "--only", "heads-1", *more)) == 0
        outputs.append(capsys.readouterr())
    assert outputs[0] == outputs[1] and outputs[1].err == ""
    bleu = figures["runs"]["heads-1"]["bleu"]
    assert cells(outputs[1].out, "heads-1")[3] == f"{bleu:.2f}"
    assert {path: path.read_bytes() for path in before} == before


def test_runs_of_other_settings_are_refused(
    done: tuple[Path, Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Stops a table of runs of different lengths, and a finished schedule from going on."""
    config, runs, _ = done
    assert ablate.main(words(config, runs, "--steps", "8", "--only", "heads-1")) == 2
    out, err = capsys.readouterr()
    assert out == "" and f"{runs / 'base-1'} was made with other settings" in err
    assert "train.max_steps 6" in err


def test_diverged_run_is_a_result(
    done: tuple[Path, Path, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Stops a variant that cannot be trained from ending the others, or from being tried again;
    and one that the configuration refuses from stopping them."""
    config, runs, _ = done
    shutil.copytree(runs, tmp_path / "runs")
    wild = ablate_plan.Variant("wild", "warmup", ("optim.lr=1e30", "optim.warmup_steps=0"))
    odd = ablate_plan.Variant("odd", "heads", ("model.num_heads=5",))
    monkeypatch.setattr(ablate_plan, "VARIANTS", (wild, odd))
    call = words(config, tmp_path / "runs", "--steps", "6")
    for trained in (True, False):
        assert ablate.main(call) == 0
        out, err = capsys.readouterr()
        assert ("[1/1] wild: error: training diverged" in err) is trained
        assert "odd is left out" in err and "num_heads" in err
        assert "\n| wild (diverged, update " in out
        assert cells(out, "base")[3] != "-"


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_stopped_runs_go_on(tmp_path: Path) -> None:
    """Stops orphans after Ctrl-C, runs that lose their state, and ones that begin again."""
    config, runs = tiny_yaml(tmp_path), tmp_path / "runs"
    command = [sys.executable, str(SCRIPTS / "ablate.py")]
    command += words(config, runs, "--steps", "100000", "--only", "base", "--threads", "1")
    reached = 0
    for number in (signal.SIGINT, signal.SIGTERM):
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=PROJECT
        )
        try:
            wait_for_updates(runs / "base-1" / "log.jsonl", reached + 10)
            process.send_signal(number)
            out, err = process.communicate(timeout=120)
        finally:
            process.kill()
        assert process.returncode == 128 + number
        assert out == "" and "the same command goes on from there" in err
        assert "failed" not in err and "Traceback" not in err
        records = read_log(runs / "base-1" / "log.jsonl")
        assert any(record["kind"] == "resume" for record in records) is (reached > 0)
        reached = max(record["step"] for record in records if record["kind"] == "train")
        saved = list((runs / "base-1" / "checkpoints").glob("*/training.json"))
        assert f"step-{reached:08d}" in [path.parent.name for path in saved]
