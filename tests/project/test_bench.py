"""The measuring program: what it counts, against arithmetic, and one small run of it."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mttrain import linear
from mttrain.tokenizer import Tokenizer

PROJECT = Path(__file__).resolve().parents[2]
SCRIPTS = PROJECT / "scripts"
sys.path.insert(0, str(SCRIPTS))

import bench  # noqa: E402
import bench_matmul  # noqa: E402
import bench_ours  # noqa: E402
import bench_peers  # noqa: E402
import bench_setup  # noqa: E402
import bench_text  # noqa: E402

# A line of each program's own log that reports an update, and the target tokens that it tells.
LOG_LINES = {
    "fairseq": (
        "2026-01-31 12:00:00 | INFO | train_inner | epoch 001:      3 / 139 loss=13.454, "
        "nll_loss=13.475, ppl=11388.3, wps=3271.2, ups=0.98, wpb=3325, bsz=272, num_updates=3, "
        "lr=1.5e-05, gnorm=2.943, clip=100, train_wall=1, wall=17",
        3325,
    ),
    "opennmt-py": (
        "[2026-01-31 12:00:00,388 INFO] Step  3/1000000; acc: 0.0; ppl: 6120.9; xent: 8.7; "
        "lr: 0.00002; sents:     315; bsz: 3465/3780/315; 3225/3518 tok/s;     19 sec;",
        3780,
    ),
    "marian": (
        "[2026-01-31 12:00:00] Ep. 1 : Up. 3 : Sen. 820 : Cost 9.13202095 * 4,631 @ 4,631 after "
        "13,188 : Time 2.04s : 2274.66 words/s : gNorm 0.0000",
        4631,
    ),
    "joeynmt": (
        "2026-01-31 12:00:00,000 - INFO - joeynmt.training - Epoch   1, Step:        3, "
        "Batch Loss:     7.302500, Batch Acc: 0.051067, Tokens per Sec:      885, Lr: 0.000100",
        1770,  # in two seconds
    ),
    "transformers": ("update of 3604 target tokens", 3604),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first lines of the demo corpus, and some blank ones."""
    folder = tmp_path_factory.mktemp("corpus")
    for part in ("train", "valid", "test"):
        for language in ("en", "de"):
            with open(PROJECT / "data" / "demo" / f"{part}.{language}", encoding="utf-8") as file:
                lines = [next(file) for _ in range(200)]
            lines[3] = "\n"
            (folder / f"{part}.{language}").write_text("".join(lines), encoding="utf-8")
    return folder


def test_window_leaves_out_what_came_before() -> None:
    """Stops the warm-up, or the tokens of the report that opens the window, from being counted."""
    reports = [(0.0, 500.0), (1.0, 10.0), (3.0, 70.0), (5.0, 100.0), (7.0, 300.0)]
    assert bench_setup.window_tokens(reports, warmup=2.0, seconds=4.0) == (100.0, 2, 4.0)
    assert bench_setup.window_tokens(reports, warmup=2.0, seconds=4.5) is None
    assert bench_setup.window_tokens([], warmup=0.0, seconds=0.0) is None


@pytest.mark.parametrize("name", sorted(LOG_LINES))
def test_reads_the_logs_of_the_others(name: str, tmp_path: Path) -> None:
    """Stops source tokens, or padding, from being taken for target tokens."""
    line, tokens = LOG_LINES[name]
    setup = bench_setup.Setup(work=str(tmp_path))
    program = bench_peers.PEERS[name](setup, tmp_path)
    assert program.tokens_of(line, 2.0) == tokens
    assert program.tokens_of("loading the data", 2.0) is None


class OwnBackward(torch.autograd.Function):
    """x @ w whose backward adds to a buffer in place, as a fused loss does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), torch.zeros_like(weight).addmm_(x.t(), grad)


def test_recorder_counts_all_products() -> None:
    """Stops products from being missed: of layers, of own backward functions, of attention."""
    batch, heads, queries, keys, width, out = 2, 3, 5, 7, 4, 6
    layer, own = nn.Linear(width, out), torch.randn(out, width, requires_grad=True)
    query = torch.randn(batch, heads, queries, width, requires_grad=True)
    key, value = torch.randn(2, batch, heads, keys, width, requires_grad=True)
    with bench_matmul.Recorder() as recorder:
        rows = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        hidden = layer(rows.reshape(-1, width))
        OwnBackward.apply(hidden, own).sum().backward()  # type: ignore[no-untyped-call]
        recorder.cut()
    flops = sum(product.flops for product in recorder.updates[0])
    count = batch * heads * queries
    attention = 6 * 2 * count * keys * width
    assert flops == attention + 2 * 3 * 2 * count * width * out
    assert not recorder.unknown


def test_replay_keeps_layouts() -> None:
    """Stops a transposed operand from being replayed as a contiguous one, which is faster."""
    a, b, out = torch.randn(4, 3), torch.randn(5, 3), torch.empty(4, 5)
    with bench_matmul.Recorder() as recorder:
        torch.mm(a, b.t(), out=out)
        torch.bmm(torch.randn(2, 3, 4).transpose(1, 2), torch.randn(2, 3, 5))
        torch.zeros(4, 5).addmm_(a, b.t())
        linear.product(a, b)
        recorder.cut()
    plain, batched, added, own = recorder.updates[0]
    assert plain.b.stride == (1, 3) and batched.a.stride == (12, 1, 4)
    assert added.adds and not plain.adds
    assert plain.a.place == added.a.place == a.data_ptr() and plain.out.place == out.data_ptr()
    replay = bench_matmul.Replay(recorder.updates, torch.device("cpu"))
    assert own.b.shape == (3, 5) and own.flops == plain.flops
    assert replay.flops == [2 * 4 * 3 * 5 * 5]
    assert replay.time_of(0, 1) > 0.0


def test_replay_lays_operands_out_as_they_lay() -> None:
    """Stops the bound from being made of operands that always lie in the caches."""
    block, apart = torch.randn(64), torch.randn(4096)  # something lies between them
    views = [block[:32].view(4, 8), block[16:48].view(8, 4), apart[:16].view(4, 4)]
    layouts = {bench_matmul.Layout.of(view) for view in views}
    unseen = bench_matmul.Layout.plain(torch.float32, 3, 5)
    ground = bench_matmul._Ground(layouts | {unseen})
    first, second, third, last = (
        ground.offset(x) for x in (*map(bench_matmul.Layout.of, views), unseen)
    )
    assert second - first == 64
    spans = sorted([(first, first + 192), (third, third + 64), (last, last + 60)])
    assert all(one[1] <= two[0] for one, two in pairwise(spans))
    assert spans[-1][1] <= ground.size <= 192 + 64 + 60 + 3 * 64


def test_common_text_is_ours_in_words(corpus: Path, tmp_path: Path) -> None:
    """Stops the programs from training on different tokens, or on words without an entry."""
    setup = bench_setup.Setup(work=str(tmp_path), vocab=400, sentences=50)
    found = bench_text.prepare(setup, corpus)
    tokenizer = Tokenizer.load(setup.text("tokenizer.json"))
    entries = set(Path(setup.text("dict.onmt.txt")).read_text(encoding="utf-8").split())
    assert len(entries) == tokenizer.size - 4
    for part, pairs in (("train", 199), ("test", 50)):
        for side in ("src", "tgt"):
            texts, tokens = (
                Path(setup.text(f"{part}.{kind}{side}")).read_text(encoding="utf-8").split("\n")
                for kind in ("", "tok.")
            )
            assert len(texts) == pairs + 1
            for text, words in zip(texts, tokens, strict=True):
                assert [f"t{i}" for i in tokenizer.encode(text)] == words.split()
                assert set(words.split()) <= entries
        assert found["parts"][part]["pairs"] == pairs


def test_ratios_are_made_round_by_round() -> None:
    """Stops the ratio of medians from standing for the median of ratios."""
    found = {
        name: [bench_setup.Measured(rate, 10.0) for rate in rates]
        for name, rates in (("mttrain", (300.0, 200.0, 100.0)), ("other", (100.0, 50.0, 100.0)))
    }
    last = bench.comparison("title", found, "tokens/s").splitlines()[-1]
    cells = [cell.strip() for cell in last.strip("|").split("|")]
    assert cells == ["other", "100", "3.00 4.00 1.00", "3.00", "10.0"]


def test_measures_training(corpus: Path, tmp_path: Path) -> None:
    """The whole way once, with a model for trying it out and a peer that is not there."""
    answer = subprocess.run(
        [
            sys.executable, SCRIPTS / "bench.py", "train", "--corpus", corpus, "--size", "mini",
            "--vocab", "300", "--batch-tokens", "256", "--seconds", "0.5", "--warmup", "0.3",
            "--rounds", "1", "--no-bound", "--peer-env", f"fairseq={tmp_path}",
            "--work", tmp_path / "work", "--json", tmp_path / "found.json",
        ],
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    assert "fairseq: not measured: " in answer.stderr
    record = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    (measured,) = record["train"]["mttrain"]
    assert measured["rate"] > 0 and measured["peak_mb"] > 50
    assert "| mttrain" in answer.stdout and "not measured" not in answer.stdout


def test_measures_sentences_of_one_length(tmp_path: Path) -> None:
    """Stops a change of the trainer from leaving the random corpus behind, which has no padding."""
    threads = torch.get_num_threads()
    setup = bench_setup.Setup(
        work=str(tmp_path), size="mini", vocab=300, threads=threads, seconds=0.0, warmup=0.0
    )
    found = bench_ours.train(setup, length=20)
    assert found["rate"] > 0 and found["padding"] == [0.0, 0.0]
