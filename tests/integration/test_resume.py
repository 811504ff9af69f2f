"""Exact resuming: a run that is stopped everywhere against one that never is."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from mttrain.checkpoint import read_index
from mttrain.loop import Trainer
from mttrain.trainer import train
from tests.integration.training_help import random_sentences, tiny_config, write_pairs
from tests.system.compare_help import differences, records, state

STEPS = 14


def data(folder: Path, **more: Any) -> dict[str, Any]:
    lines = random_sentences(70, seed=3)
    return {
        "train": write_pairs(folder, "train", [(line, line) for line in lines]),
        "valid": write_pairs(folder, "valid", [(line, line) for line in lines[:8]]),
        **more,
    }


def stop_at(monkeypatch: pytest.MonkeyPatch, method: str, update: int, *, before: bool) -> None:
    """A SIGTERM before or after a step of the loop, when so many updates are done."""
    plain, sent = getattr(Trainer, method), []

    def send(self: Trainer) -> None:
        if self.progress.update == update and not sent:  # a second one would end the process
            sent.append(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)

    def interrupted(self: Trainer, *arguments: Any, **named: Any) -> Any:
        if before:
            send(self)
        result = plain(self, *arguments, **named)
        send(self)
        return result

    monkeypatch.setattr(Trainer, method, interrupted)


@pytest.mark.parametrize(("workers", "dropout"), [(0, 0.0), (1, 0.3)])
def test_stopped_after_every_update(
    workers: int, dropout: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D08, R02, R14, R22, R26: in the middle of an epoch, at its edge, with a group that it cuts
    short, before each validation and in the last epoch; weights, moments, order, masks, subwords
    under BPE-dropout, both passes of R-Drop, running means, records, best and patience are those of
    the run that was never stopped, to the bit."""
    merges = {"dropout": dropout}
    sections: dict[str, Any] = {"tokenizer": merges, "optim": {"rdrop": 5.0 if dropout else 0.0}}
    text = data(tmp_path, workers=workers)
    settings = {
        "max_steps": STEPS, "valid_every": 3, "accumulate": 2, "log_every": 2, "patience": 50,
        "keep_last": 2, "average": 2, "average_of": "both", "ema": 0.5,
    }  # fmt: skip
    whole = train(tiny_config(tmp_path / "whole", text, train=settings, **sections)).run_dir
    epochs = records(whole, "epoch")
    assert len(epochs) > 2 and epochs[0]["batches"] % 2 == 1, "no group is cut short by an edge"
    config = tiny_config(tmp_path / "cut", text, train=settings, **sections)
    for update in range(1, STEPS):
        with monkeypatch.context() as patch:
            stop_at(patch, "_update", update, before=False)
            assert train(config).reason == "SIGTERM"
    cut = train(config)
    assert cut.reason == "max_steps"
    assert differences(cut.run_dir, whole, STEPS) == []


@pytest.mark.parametrize("before", [True, False])
def test_stopped_around_a_validation(
    before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R10, R20, R26: a signal in a validation cuts it short, and it comes again whole; one that
    comes while its checkpoint is written is obeyed after it."""
    text, settings = data(tmp_path), {"max_steps": 6, "valid_every": 3}
    whole = train(tiny_config(tmp_path / "whole", text, train=settings)).run_dir
    config = tiny_config(tmp_path / "cut", text, train=settings)
    with monkeypatch.context() as patch:
        stop_at(patch, "_validate" if before else "_save", 3, before=True)
        assert train(config).reason == "SIGTERM"
    cut = train(config).run_dir
    assert differences(cut, whole, 6) == []


def test_more_steps_on_a_finished_run(tmp_path: Path) -> None:
    """R22: raising the limit goes on as if it had been higher from the start."""
    text = data(tmp_path)
    limits = {"schedule": "constant"}
    whole = train(tiny_config(tmp_path / "whole", text, optim=limits)).run_dir
    train(tiny_config(tmp_path / "cut", text, optim=limits, train={"max_steps": 7}))
    cut = train(tiny_config(tmp_path / "cut", text, optim=limits)).run_dir
    first, second = state(whole, 12)[0], state(cut, 12)[0]
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_stop_right_after_resuming_keeps_the_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R10: the newest checkpoint was saved again without its scores, and never validated again."""
    config = tiny_config(tmp_path, data(tmp_path), train={"max_steps": 6, "valid_every": 6})
    train(config)
    before = read_index(Path(config.run_dir)).scores
    more = tiny_config(tmp_path, data(tmp_path), train={"max_steps": 12, "valid_every": 6})
    with monkeypatch.context() as patch:
        stop_at(patch, "_validate_if_due", 6, before=True)
        assert train(more).reason == "SIGTERM"
    assert before["step-00000006"] and read_index(Path(config.run_dir)).scores == before


def test_an_earlier_mean_goes_when_none_is_made(tmp_path: Path) -> None:
    """A mean of the first end stayed for ever when the next one had a single candidate."""
    settings = {"max_steps": 6, "valid_every": 2, "average": 0}
    run = train(tiny_config(tmp_path, data(tmp_path), train=settings)).run_dir
    left = run / "checkpoints" / "average"
    left.mkdir()
    train(tiny_config(tmp_path, data(tmp_path), train={**settings, "max_steps": 8}))
    assert not left.exists()
