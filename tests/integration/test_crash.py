"""Proof by injury that a run cannot be lost: each file operation of a save fails or is the last."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from mttrain.checkpoint import (
    checkpoint_names,
    load_model,
    newest_good,
    resolve_model,
    verify,
)
from mttrain.errors import CheckpointError
from tests.integration.training_help import random_sentences, tiny_config, write_pairs
from tests.system.compare_help import (
    DAMAGES,
    damage,
    differences,
    leftovers,
    records,
    wounds,
)
from tests.system.fault_help import (
    CHANGING,
    DEATH,
    TAKES_SPACE,
    Child,
    Ended,
    Fault,
    Launcher,
    quick_folder,
    shared_memory_of_the_dead,
    wait_for_empty_sessions,
)

STEPS = 4  # of a whole run; the save that is hurt is that of the last


class Case:
    """A run that stands before its last validation, and the same run without a fault."""

    def __init__(self, folder: Path, launcher: Launcher) -> None:
        lines = random_sentences(24, seed=3)
        data = {
            "train": write_pairs(folder, "train", [(line, line) for line in lines]),
            "valid": write_pairs(folder, "valid", [(line, line) for line in lines[:3]]),
        }
        train = {"max_steps": STEPS, "valid_every": 1, "keep_last": 3, "best_metric": "nll"}
        model = {"d_model": 16, "d_ff": 32, "num_heads": 2}
        config = tiny_config(
            folder, data, train=train, model=model, decode={"beam": 1, "max_length": 4}
        )
        self._config = folder / "run.yaml"
        config = config.model_copy(update={"threads": 1})
        # Only what is set, and JSON is YAML: reading every default would take a tenth of a case.
        self._config.write_text(json.dumps(config.model_dump(mode="json", exclude_unset=True)))
        self._launcher, self._base = launcher, folder / "base"
        self.run, self.whole = folder / "run", folder / "whole"
        assert launcher.run(self._argv("--set", f"run_dir={self.whole}")).status == 0
        assert self.train(self.fault("death", at=1)).status == DEATH
        self.run.rename(self._base)

    def _argv(self, *more: str) -> list[str]:
        return ["train", "--config", str(self._config), *more]

    def fault(self, kind: str, **details: Any) -> Fault:
        """A fault in or after the last validation."""
        return Fault(str(self.run), kind, update=STEPS, **details)

    def restore(self, base: Path | None = None) -> None:
        """Put the run back to where it stood before the fault, or to what `base` holds."""
        shutil.rmtree(self.run, ignore_errors=True)
        shutil.copytree(base or self._base, self.run)

    def start(self, *more: str, fault: Fault | None = None) -> Child:
        return self._launcher.start(self._argv(*more), fault)

    def train(self, fault: Fault | None = None) -> Ended:
        return self.start(fault=fault).wait()

    def walk(self, *faults: Fault, base: Path | None = None) -> list[dict[str, Any]]:
        """Each fault at each operation of the last save in turn: all was whole after it, and
        resuming gave the run that never had one."""
        cases: list[dict[str, Any]] = self._launcher.call(
            "walk",
            argv=self._argv(),
            base=str(base or self._base),
            whole=str(self.whole),
            steps=STEPS,
            faults=[asdict(fault) for fault in faults],
        )
        for case in cases:
            assert "Traceback" not in case["err"] and not case["wounds"], case
            if "again" not in case:  # another operation left the directory in the same state
                continue
            assert case["again"] == 0 and not case["differences"], case
            if "is finished" not in case["again_err"]:  # such a start touches nothing
                resumed = [f"resuming after update {step}" for step in (STEPS - 1, STEPS)]
                assert any(text in case["again_err"] for text in resumed), case
                assert not case["leftovers"], case
        return cases

    def check(self, ended: Ended) -> None:
        """After a fault: all is whole, and resuming gives the run that never had one."""
        assert "Traceback" not in ended.err and not wounds(self.run), ended
        again = self.train()
        assert again.status == 0, f"{ended}\n{again}"
        assert not leftovers(self.run), ended
        assert not differences(self.run, self.whole, STEPS), ended


@pytest.fixture(scope="module")
def case() -> Iterator[Case]:
    with quick_folder() as folder, Launcher(folder) as launcher:
        yield Case(folder, launcher)


# ---- saving goes wrong -------------------------------------------------------------------------


def test_every_file_operation_of_a_save_fails(case: Case) -> None:
    """R09: some operation of a save was not guarded: a traceback, a checkpoint without its scores,
    or a good one destroyed. A full disk stays full; a bad sector strikes once."""
    struck = []
    full = case.fault("error", number=errno.ENOSPC, sticky=True)
    for told in case.walk(full, case.fault("error", number=errno.EIO)):
        struck.append(told["struck"])
        assert told["status"] in (0, 3, 4), told  # 0: what is not needed, such as a removal
        if told["status"]:
            lines = [line for line in told["err"].splitlines() if line.startswith("error: ")]
            assert len(lines) == 1 and "cannot write" in lines[0], told
            assert os.strerror(told["number"]) in lines[0], told
    for part in ("save_file", "training.json", "meta.json", "log.jsonl", "rename", "unlink"):
        assert any(part in what for what in struck), part
    assert any("replace" in what and "/checkpoints/.tmp-" in what for what in struck)  # the index


@pytest.mark.parametrize("half", [False, True])
def test_death_at_every_file_operation_of_a_save(case: Case, half: bool) -> None:
    """R08, R10, R22: a process that ended between two operations left half a checkpoint under its
    final name, one that the index did not know, or a state that would not resume."""
    # fsync is left to the slow tests: whoever looks afterwards sees no difference.
    names = ("write", "save_file") if half else sorted(TAKES_SPACE.union(CHANGING) - {"fsync"})
    cases = case.walk(case.fault("death", half=half, names=names))
    assert all(told["status"] == DEATH for told in cases)
    assert len(cases) > (5 if half else 30)


def test_death_while_a_checkpoint_is_replaced(case: Case) -> None:
    """R08, R20: a signal in a validation saves an update that is saved once more with its scores;
    a death between the two renames must not cost it, nor make `translate` refuse the run."""
    case.restore()
    stopped = case.train(case.fault("signal", at=0, number=signal.SIGTERM))
    assert stopped.status == 143, stopped.err
    assert checkpoint_names(case.run)[-1] == f"step-{STEPS:08d}"
    assert records(case.run, "valid")[-1]["step"] == STEPS - 1  # it was cut short
    base = case.run.with_name("stopped")
    case.run.rename(base)
    assert len(case.walk(case.fault("death", names=("rename", "rmdir")), base=base)) >= 4
    best = resolve_model(case.run)  # it, too, may be the one that is replaced, by an average
    best.rename(best.with_name(f".old-{best.name}"))
    assert load_model(case.run).meta["step"] == STEPS


def test_death_at_the_first_start(case: Case) -> None:
    """R08: a directory that was left before its config.yaml was complete was refused as a foreign
    one, and a temporary file of it stayed for ever."""
    for at in range(1, 7):
        shutil.rmtree(case.run, ignore_errors=True)
        ended = case.train(Fault(str(case.run), "death", at=at, names=("open", "replace")))
        assert ended.status == DEATH
        again = case.train()
        assert again.status == 0, f"{ended.struck}:\n{again.err}"
        assert not leftovers(case.run), ended.struck
        assert not differences(case.run, case.whole, STEPS), ended.struck


# ---- damage ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_newest_checkpoint(case: Case, how: str) -> None:
    """R08: one damaged file in the newest checkpoint stopped the run, or was trained on."""
    case.restore()
    newest = newest_good(case.run)
    assert newest is not None and newest.name == f"step-{STEPS - 1:08d}"
    for name in sorted(path.name for path in newest.iterdir()):
        case.restore()
        damage(newest / name, how)
        ended = case.train()
        assert ended.status == 0, ended.err
        assert f"warning: {newest}" in ended.err, f"{name}:\n{ended.err}"
        assert f"resuming after update {STEPS - 2}" in ended.err
        assert not differences(case.run, case.whole, STEPS), name


def test_damaged_newest_checkpoint_after_a_signal(case: Case) -> None:
    """R08, R20: a checkpoint that a signal had saved took the training state from the one before it
    and was removed at the next save: then only one had a state, and its damage was the end."""
    shutil.rmtree(case.run, ignore_errors=True)
    every = ("--set", "train.valid_every=2")
    until = {steps: (*every, "--set", f"train.max_steps={steps}") for steps in (2, 3)}
    assert case.start(*until[2]).wait().status == 0
    # Update 3 is saved by a signal, before it is validated as the last one.
    stop = Fault(str(case.run), "signal", signal.SIGTERM, update=3)
    assert case.start(*until[3], fault=stop).wait().status == 143
    assert case.start(*every).wait().status == 0
    newest = newest_good(case.run)
    assert newest is not None and newest.name == f"step-{STEPS:08d}"
    damage(newest / "training.json", "cut")
    ended = case.start(*every, "--set", f"train.max_steps={STEPS + 1}").wait()
    assert ended.status == 0 and "resuming after update 3" in ended.err, ended


def test_each_byte_of_meta_counts(case: Case) -> None:
    """R08: meta.json holds the sums of the other files and had none of its own: a flipped bit in a
    score changed which checkpoint is the best, one in a hash made the run refuse to resume."""
    case.restore()
    folder = newest_good(case.run)
    assert folder is not None
    path = folder / "meta.json"
    good = path.read_bytes()
    content = json.loads(good)
    for at in range(len(good)):
        damage(path, "flip", at)
        try:
            verify(folder)
        except CheckpointError:
            pass
        else:  # a digit that a float has no room for, or the name of the sum itself
            found = json.loads(path.read_bytes())
            wrong = [key for key, value in content.items() if found.get(key) != value]
            assert wrong in ([], ["content_sha256"]), (at, wrong)
        path.write_bytes(good)


@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_index_is_made_again(case: Case, how: str) -> None:
    """R10: with all checkpoints whole, an unreadable index.json stopped the run for good."""
    case.restore()
    damage(case.run / "checkpoints" / "index.json", how, at=0 if how == "flip" else None)
    ended = case.train()
    assert ended.status == 0, ended.err
    assert "index.json" in ended.err and "made again" in ended.err
    assert not differences(case.run, case.whole, STEPS)


# ---- signals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_inside_a_save(case: Case, number: int, status: int) -> None:
    """R20: one signal must not break the save in progress; the second ends at once, with the
    checkpoint before it whole. At 0 they come in the validation."""
    for at in (0, 1, 25):
        case.restore()
        ended = case.train(case.fault("signal", at=at, number=number))
        assert ended.status == status and ended.struck, ended
        case.check(ended)
        case.restore()
        ended = case.train(case.fault("signal", at=at, number=number, times=2))
        assert ended.status == -number and ended.struck, ended
        case.check(ended)


def wait_for(child: Child, path: Path, count: int) -> None:
    """Return when so many updates stand in the log of a running child."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not child.ended():
        if path.exists() and path.read_bytes().count(b'"kind": "train"') >= count:
            return
        time.sleep(0.01)
    raise AssertionError(f"no {count} updates; it said:\n{child.err()}")


def test_second_signal_with_loader_workers(case: Case) -> None:
    """R20: who presses Ctrl-C twice wants it to end: at once, without orphans that hold the lock,
    the memory or the terminal, and with the last checkpoint whole."""
    shutil.rmtree(case.run, ignore_errors=True)
    before = shared_memory_of_the_dead()
    endless = ("--set", "train.max_steps=1000000", "--set", "data.workers=2")
    child = case.start(*endless, "--set", "train.valid_every=5")
    wait_for(child, case.run / "log.jsonl", 8)
    child.kill(signal.SIGINT)
    child.kill(signal.SIGTERM)
    ended = child.wait()
    # Both may come before the loop looks: then the second one ends it, or the first has saved.
    assert ended.status in (130, 143, -signal.SIGINT, -signal.SIGTERM), ended.err
    assert "Traceback" not in ended.err
    assert not wounds(case.run)
    assert not wait_for_empty_sessions([child.pid])
    assert shared_memory_of_the_dead() <= before


# ---- two at once -------------------------------------------------------------------------------


def test_the_second_of_two_is_refused_and_a_dead_one_is_not(case: Case) -> None:
    """R13: two processes in one directory; and the lock of a process that was killed was held for
    seconds by its loader workers, so that the next start was refused in the name of a dead one."""
    shutil.rmtree(case.run, ignore_errors=True)
    endless = ("--set", "train.max_steps=1000000", "--set", "data.workers=2")
    first = case.start(*endless, "--set", "train.valid_every=5")
    wait_for(first, case.run / "log.jsonl", 8)
    second = case.start(*endless, "--set", "train.valid_every=5").wait()
    assert second.status == 2 and second.err.count("\n") == 1
    assert f"in use by another training (process {first.pid})" in second.err
    assert not first.ended()
    first.kill(signal.SIGKILL)
    first.wait()
    third = case.start(*endless, "--set", "train.valid_every=5")
    wait_for_text(third, "resuming after update")
    third.kill(signal.SIGTERM)
    ended = third.wait()
    assert ended.status == 143, ended.err
    assert len(records(case.run, "begin")) == 1
    assert not wait_for_empty_sessions([first.pid, third.pid])


def wait_for_text(child: Child, text: str) -> None:
    deadline = time.monotonic() + 120
    while text not in child.err():
        assert time.monotonic() < deadline and not child.ended(), child.err()
        time.sleep(0.01)
