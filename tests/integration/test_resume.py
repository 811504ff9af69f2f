"""Exact resuming: a run that is stopped everywhere against one that never is."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from mttrain.checkpoint import load_model, load_train_state, read_index
from mttrain.loop import Trainer
from mttrain.runlog import read_log
from mttrain.trainer import train
from tests.integration.training_help import random_sentences, tiny_config, write_pairs

CLOCK = {"time", "seconds", "tokens_per_second", "waiting", "elapsed"}
STEPS = 14


def data(folder: Path, **more: Any) -> dict[str, Any]:
    lines = random_sentences(70, seed=3)
    return {
        "train": write_pairs(folder, "train", [(line, line) for line in lines]),
        "valid": write_pairs(folder, "valid", [(line, line) for line in lines[:8]]),
        **more,
    }


def records(run: Path) -> list[dict[str, Any]]:
    """What was trained and found, without what a clock makes."""
    return [
        {key: value for key, value in record.items() if key not in CLOCK}
        for record in read_log(run / "log.jsonl")
        if record["kind"] in ("train", "valid", "epoch")
    ]


def state(run: Path, step: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Weights and optimiser; and the numbers of the run."""
    folder = run / "checkpoints" / f"step-{step:08d}"
    saved = load_train_state(folder)
    tensors = dict(saved.tensors)
    for name, parameter in load_model(folder).model.named_parameters():
        tensors[name] = parameter.detach()
    values = dict(saved.values)
    progress = {k: v for k, v in values.pop("progress").items() if k not in CLOCK}
    progress["window"] = {k: v for k, v in progress["window"].items() if k not in CLOCK}
    return tensors, {**values, **progress}


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


@pytest.mark.parametrize("workers", [0, 1])
def test_stopped_after_every_update(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D08, R02, R14, R22, R26: in the middle of an epoch, at its edge, with a group that it cuts
    short, before each validation and in the last epoch; weights, moments, order, masks, records,
    best and patience are those of the run that was never stopped, to the bit."""
    text = data(tmp_path, workers=workers)
    settings = {
        "max_steps": STEPS, "valid_every": 3, "accumulate": 2, "log_every": 2, "patience": 50,
        "keep_last": 2, "average": 2,
    }  # fmt: skip
    whole = train(tiny_config(tmp_path / "whole", text, train=settings)).run_dir
    epochs = [record for record in records(whole) if record["kind"] == "epoch"]
    assert len(epochs) > 2 and epochs[0]["batches"] % 2 == 1, "no group is cut short by an edge"
    config = tiny_config(tmp_path / "cut", text, train=settings)
    for update in range(1, STEPS):
        with monkeypatch.context() as patch:
            stop_at(patch, "_update", update, before=False)
            assert train(config).reason == "SIGTERM"
    cut = train(config)
    assert cut.reason == "max_steps"
    assert records(cut.run_dir) == records(whole)
    (first, numbers), (second, others) = state(whole, STEPS), state(cut.run_dir, STEPS)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert numbers == others
    assert read_index(cut.run_dir) == read_index(whole)


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
    assert records(cut) == records(whole)
    first, second = state(whole, 6), state(cut, 6)
    assert all(torch.equal(first[0][name], second[0][name]) for name in first[0])
    assert first[1] == second[1] and read_index(cut) == read_index(whole)


def test_more_steps_on_a_finished_run(tmp_path: Path) -> None:
    """R22: raising the limit goes on as if it had been higher from the start."""
    text = data(tmp_path)
    limits = {"schedule": "constant"}
    whole = train(tiny_config(tmp_path / "whole", text, optim=limits)).run_dir
    train(tiny_config(tmp_path / "cut", text, optim=limits, train={"max_steps": 7}))
    cut = train(tiny_config(tmp_path / "cut", text, optim=limits)).run_dir
    first, second = state(whole, 12)[0], state(cut, 12)[0]
    assert all(torch.equal(first[name], second[name]) for name in first)
