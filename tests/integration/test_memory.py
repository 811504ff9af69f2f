"""Batches that do not fit in memory: computed in pieces, counted, never dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mttrain.checkpoint import load_model
from mttrain.distributed import World
from mttrain.errors import TrainingError
from mttrain.runlog import read_log
from mttrain.trainer import train
from mttrain.update import StepModule, Updater
from tests.integration.training_help import random_sentences, tiny_config, write_pairs

ROWS = 9  # pairs that fit


def data(folder: Path) -> dict[str, Any]:
    lines = random_sentences(60, seed=3)
    return {
        "train": write_pairs(folder, "train", [(line, line) for line in lines]),
        "valid": write_pairs(folder, "valid", [(line, line) for line in lines[:5]]),
    }


def small_memory(monkeypatch: pytest.MonkeyPatch, where: str, rows: int = ROWS) -> None:
    """Refuse more than so many pairs at once, in forward or near the end of backward."""
    plain = StepModule.forward

    def refuse(*_: Any) -> None:
        raise torch.OutOfMemoryError("pretended")

    def forward(self: StepModule, source: Any, *others: Any) -> Any:
        embedding = self.model.encoder.embed_tokens.weight
        for hook in list(embedding._backward_hooks or ()):  # of an earlier batch
            embedding._backward_hooks.pop(hook)  # type: ignore[union-attr]
        if source.shape[0] > rows and torch.is_grad_enabled():
            if where == "forward":
                refuse()
            embedding.register_hook(refuse)  # type: ignore[no-untyped-call]
        return plain(self, source, *others)

    monkeypatch.setattr(StepModule, "forward", forward)


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    model = load_model(run / "checkpoints" / f"step-{step:08d}").model
    return dict(model.named_parameters())


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_batch_is_computed_in_pieces_and_counted(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A batch that did not fit was skipped with a warning: its pairs were never learned. The pieces
    must train what the whole trains, also when backward had already left gradients behind."""
    text, settings = data(tmp_path), {"max_steps": 6, "accumulate": 2}
    whole = train(tiny_config(tmp_path / "a", text, train=settings, model={"dropout": 0.0}))
    small_memory(monkeypatch, where)
    capsys.readouterr()
    cut = train(tiny_config(tmp_path / "b", text, train=settings, model={"dropout": 0.0}))
    first, second = weights(whole.run_dir, 6), weights(cut.run_dir, 6)
    for name, value in first.items():
        if not name.endswith("k_proj.bias"):  # its gradient is rounding alone: it moves all scores
            torch.testing.assert_close(second[name], value, rtol=1e-3, atol=1e-4)
    log = read_log(cut.run_dir / "log.jsonl")
    events = [record for record in log if record["kind"] == "cut"]
    last = [record for record in log if record["kind"] == "train"][-1]
    assert events and last["cut"] == len(events)
    assert all(record["pieces"] in (2, 4, 8) for record in events)
    tokens = [
        sum(r["target_tokens"] for r in read_log(run / "log.jsonl") if r["kind"] == "train")
        for run in (whole.run_dir, cut.run_dir)
    ]
    assert tokens[0] == tokens[1]
    assert capsys.readouterr().err.count("did not fit in memory") == 1


def test_a_pair_that_does_not_fit_alone_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be computed is named with its line, and what to change."""
    small_memory(monkeypatch, "forward", rows=0)
    config = tiny_config(tmp_path, data(tmp_path))
    with pytest.raises(TrainingError, match=r"a batch of 1 pairs.*train\.src, line \d+.*batch_tok"):
        train(config)


def test_several_processes_do_not_try_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process that repeats its update would leave the others waiting for ever."""
    import mttrain.loop

    small_memory(monkeypatch, "forward")
    plain = Updater.run

    def as_one_of_two(self: Updater, *arguments: Any) -> Any:
        self.world = World(0, 2, torch.device("cpu"))
        return plain(self, *arguments)

    monkeypatch.setattr(mttrain.loop.Updater, "run", as_one_of_two)
    ways = "Go on with train.activation_checkpointing: true and train.parallel: fsdp; or lower"
    with pytest.raises(TrainingError, match=f"out of memory in update 1, at a batch of .*{ways}"):
        train(tiny_config(tmp_path, data(tmp_path)))


def test_other_errors_are_not_taken_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of shapes must not make the trainer cut its batches down to single pairs."""

    def broken(*_: Any) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(StepModule, "forward", broken)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        train(tiny_config(tmp_path, data(tmp_path)))
