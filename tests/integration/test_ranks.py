"""Two processes against one in float64, sharded or not, with what can happen to a process."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from mttrain.checkpoint import checkpoint_names
from mttrain.config import RunConfig
from mttrain.runlog import read_log
from tests.integration.ranks_help import (
    Accident,
    finish_ranks,
    run_ranks,
    run_torchrun,
    tensors,
)
from tests.integration.training_help import random_sentences, tiny_config, write_pairs

STEPS = 50
EXACT = {"rtol": 0.0, "atol": 1e-9}
LATE: dict[str, Any] = {"precision": "fp16", "max_steps": 12, "log_every": 5}


def copying(folder: Path, name: str, lines: list[str]) -> dict[str, str]:
    return write_pairs(folder / "text", name, [(line, line) for line in lines])


class Runs:
    """The configurations of one text, by name of the run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # 61 pairs make an odd number of batches; a validation line on one rank is far longer.
        self.odd = copying(folder, "odd", random_sentences(61, seed=5))
        valid = [*random_sentences(4, seed=6), " ".join(random_sentences(60, seed=7))]
        self.valid = copying(folder, "valid", valid)
        # Every second line is too long, as if all that a rank would get were; three corpora of
        # unlike sizes.
        short, long = random_sentences(24, seed=8), random_sentences(24, 9, shortest=90, longest=99)
        mixed = [line for pair in zip(short, long, strict=True) for line in pair]
        self.uneven = [
            copying(folder, f"uneven{i}", lines)
            for i, lines in enumerate((mixed, random_sentences(1, 10), random_sentences(9, 11)))
        ]

    def config(
        self, name: str, train: object = None, optim: dict[str, Any] | None = None, **settings: Any
    ) -> RunConfig:
        """Settings of `train`, on the text `train` (the odd one unless another is given)."""
        defaults = {"max_steps": STEPS, "valid_every": 100, "ema": 0.9}
        config = tiny_config(
            self.folder,
            {"train": train or self.odd, "valid": self.valid},
            model={"attention_dropout": 0.1},
            optim={"eps": 1e-8, **(optim or {})},
            train={**defaults, **settings},
        )
        return config.model_copy(update={"run_dir": str(self.folder / name), "threads": 1})

    def tensors(self, name: str, step: int = STEPS) -> dict[str, torch.Tensor]:
        return tensors(self.folder / name, step)


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], msg=lambda m: f"{name}: {m}", **EXACT)  # noqa: B023


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """One process with two batches an update, and two with one each: the same global batches."""
    made = Runs(tmp_path_factory.mktemp("ranks"))
    rdrop = {"rdrop": 1.0}
    finish_ranks(
        made.folder / "alone",
        [
            made.config("one", accumulate=2),
            made.config("uneven-one", made.uneven, rdrop, accumulate=2, max_steps=9),
            made.config("single-one", made.odd, accumulate=2, batch_tokens=4000, max_steps=9),
            made.config("waiting", accumulate=2, **LATE),
        ],
        ranks=1,
    )
    sharded = {"parallel": "fsdp", "activation_checkpointing": True}
    finish_ranks(
        made.folder / "both",
        [
            made.config("ddp"),
            made.config("fsdp", **sharded),
            made.config("uneven-two", made.uneven, rdrop, parallel="fsdp", max_steps=9),
            made.config("single-two", made.odd, batch_tokens=4000, max_steps=9),
            made.config("changing", max_steps=20, parallel="fsdp"),
            made.config("changing", max_steps=35),
        ],
    )
    return made


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_train_what_one_does(runs: Runs, kind: str) -> None:
    """R18, M09: the divisor counts the tokens of all ranks, dropout follows the global batch
    and is the same where it is computed again; weights, moments and running means."""
    assert_same(runs.tensors("one"), runs.tensors(kind))


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_validation_counts_every_pair_once(runs: Runs, kind: str) -> None:
    """R18: totals over ranks, whatever the batches of each."""
    one, two = (
        [r for r in read_log(runs.folder / name / "log.jsonl") if r["kind"] == "valid"]
        for name in ("one", kind)
    )
    assert len(one) == len(two) == 1
    for key in ("target_tokens", "accuracy", "bleu", "chrf"):
        assert one[0][key] == two[0][key]
    assert one[0]["nll"] == pytest.approx(two[0]["nll"], rel=1e-9)


@pytest.mark.parametrize("text", ["uneven", "single"])
def test_ranks_without_pairs_wait_for_nobody(runs: Runs, text: str) -> None:
    """R18: lines that are too long, corpora of unlike sizes, and a corpus of a single batch, of
    which the second rank never has a pair: no hang, and the same result."""
    assert_same(runs.tensors(f"{text}-one", 9), runs.tensors(f"{text}-two", 9))


def test_goes_on_under_another_number_of_processes(runs: Runs) -> None:
    """R18: sharded over two processes, then whole on each of two, then in one."""
    finish_ranks(runs.folder / "last", [runs.config("changing", accumulate=2)], ranks=1)
    assert_same(runs.tensors("one"), runs.tensors("changing"))


def test_steps_that_look_at_the_norm_themselves(runs: Runs) -> None:
    """What runs on GPUs, where nobody waits for the norm of the gradient: the same updates, with
    the scaler of fp16 on whole gradients and on shards."""
    late = [runs.config(f"late-{kind}", parallel=kind, **LATE) for kind in ("ddp", "fsdp")]
    finish_ranks(runs.folder / "late-ranks", late, deferred=True)
    for kind in ("ddp", "fsdp"):
        assert_same(runs.tensors("waiting", 12), runs.tensors(f"late-{kind}", 12))


@pytest.mark.parametrize("killed", [0, 1])
def test_a_dead_rank_ends_the_job(runs: Runs, killed: int) -> None:
    """R18: the other rank neither waits for hours nor dies of a traceback."""
    config = runs.config(f"dead{killed}")
    found = run_ranks(
        runs.folder / f"dead{killed}-ranks",
        [config],
        accident=Accident(killed, 7, signal.SIGKILL),
    )
    assert found[killed][0] == -signal.SIGKILL
    status, err = found[1 - killed]
    assert status == 1, err[-3000:]
    assert "another process of this job has ended" in err and "Traceback" not in err


def test_torchrun_starts_again_where_it_stood(runs: Runs) -> None:
    """R14: a kill -9 of one rank costs the updates since the last checkpoint, and nothing else."""
    config = runs.config("again", valid_every=10)
    accident = Accident(1, 27, signal.SIGKILL)
    status, err = run_torchrun(runs.folder / "again-ranks", config, restarts=1, accident=accident)
    assert status == 0, err[-3000:]
    assert "resuming after update 20" in err
    assert_same(runs.tensors("ddp"), runs.tensors("again"))


def test_a_signal_to_one_rank_stops_all_with_one_checkpoint(runs: Runs) -> None:
    """R20: both end after the same update, and one process goes on from there."""
    config = runs.config("signal")
    accident = Accident(1, 7, signal.SIGTERM)
    found = run_ranks(runs.folder / "signal-ranks", [config], accident=accident)
    assert [status for status, _ in found] == [128 + signal.SIGTERM] * 2, found
    assert "stopped by SIGTERM after update 7" in found[0][1]
    assert checkpoint_names(Path(config.run_dir)) == ["step-00000007"]
    finish_ranks(runs.folder / "signal-one", [runs.config("signal", accumulate=2)], ranks=1)
    assert_same(runs.tensors("one"), runs.tensors("signal"))


def test_the_end_is_what_rank_0_sees(tmp_path: Path) -> None:
    """Each rank listed and read the checkpoints for itself: where a shared file system shows them
    late, ranks scored other candidates than rank 0, and waited for one another."""
    runs = Runs(tmp_path)
    config = runs.config("late", max_steps=6, valid_every=2, average=2, average_of="both", ema=None)
    blind = (
        "import mttrain.ending as ending\n"
        "if os.environ['RANK'] == '1':\n"
        "    ending.checkpoint_names = lambda run_dir: []\n"
        "    ending.average_checkpoints = ending.read_index = None\n"
    )
    finish_ranks(tmp_path / "ranks", [config], before=blind)
    (found,) = (
        r for r in read_log(Path(config.run_dir) / "log.jsonl") if r["kind"] == "candidates"
    )
    assert [len(c["checkpoints"]) for c in found["candidates"]][:2] == [1, 2]
