"""kill -9 in a loop, and death at every file operation of a whole run: nothing may be lost.

The seed of the random moments is printed; MTTRAIN_SEED sets it.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import secrets
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mttrain.config import RunConfig, dump_config
from tests.integration.training_help import random_sentences, tiny_config, write_pairs
from tests.system.compare_help import differences, leftovers, records, tracebacks, wounds
from tests.system.fault_help import (
    DEATH,
    Ended,
    Fault,
    Launcher,
    shared_memory_of_the_dead,
    wait_for_empty_sessions,
)

pytestmark = pytest.mark.slow

SEED = int(os.environ.get("MTTRAIN_SEED") or secrets.randbelow(2**31))
KILLS = 60  # for each number of loader workers


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    with Launcher(tmp_path_factory.mktemp("children")) as server:
        yield server


def config_of(folder: Path, steps: int, **train: Any) -> RunConfig:
    """Every update is validated and saved; the end averages, and scores a test set."""
    lines = random_sentences(40, seed=3)
    data: dict[str, Any] = {
        "train": write_pairs(folder, "train", [(line, line) for line in lines]),
        "valid": write_pairs(folder, "valid", [(line, line) for line in lines[:4]]),
    }
    data["test"] = data["valid"]
    settings = {"max_steps": steps, "valid_every": 1, "keep_last": 3, "average": 2, **train}
    model = {"d_model": 16, "d_ff": 32, "num_heads": 2}
    config = tiny_config(folder, data, train=settings, model=model)
    return config.model_copy(update={"threads": 1})


class Case:
    """A configuration, the run that is hurt, and the same run without a fault."""

    def __init__(self, folder: Path, launcher: Launcher, steps: int, **train: Any) -> None:
        self.launcher, self.steps = launcher, steps
        self.run, self.whole = folder / "run", folder / "whole"
        self._config = folder / "run.yaml"
        self._config.write_text(dump_config(config_of(folder, steps, **train)))
        start = time.monotonic()
        whole = launcher.run(self.argv("--set", f"run_dir={self.whole}"))
        self.seconds = time.monotonic() - start
        assert whole.status == 0, whole.err

    def argv(self, *more: str) -> list[str]:
        return ["train", "--config", str(self._config), *more]

    def check_finished(self, what: str) -> None:
        found = differences(self.run, self.whole, self.steps)
        assert not found, f"{what}: {found}"


@pytest.mark.parametrize("workers", [0, 2])
def test_killed_at_random_moments(tmp_path: Path, launcher: Launcher, workers: int) -> None:
    """R08, R10, R22, R26: a kill that meets a save, a validation, a start or the end must cost the
    updates since the last checkpoint and nothing else: no checkpoint, no score, no record, no best,
    no patience; and no file, process or shared memory may stay."""
    chooser = random.Random(SEED + workers)
    print(f"MTTRAIN_SEED={SEED}")
    case = Case(tmp_path, launcher, steps=40, accumulate=2, log_every=2)
    argv = case.argv("--set", f"data.workers={workers}")
    memory = shared_memory_of_the_dead()
    kills, finished, sessions, stray = 0, 0, [], set()
    while kills < KILLS or not finished:
        child = launcher.start(argv)
        sessions.append(child.pid)
        # Some start is let run to its end; or the last run would never get there.
        patience = 1e9 if kills >= KILLS else chooser.uniform(0, case.seconds / 2)
        wake = time.monotonic() + patience
        while time.monotonic() < wake and not child.ended():
            time.sleep(0.001)
        child.kill(signal.SIGKILL)
        ended = child.wait()
        what = f"MTTRAIN_SEED={SEED}, kill {kills}"
        assert ended.status in (0, -signal.SIGKILL), f"{what}:\n{ended.err}"
        assert not wounds(case.run), what
        if "resuming after" in ended.err:  # it has passed what puts a directory right
            assert not stray & leftovers(case.run), what
        stray = leftovers(case.run)
        if ended.status == 0:
            finished += 1
            case.check_finished(what)
            shutil.rmtree(case.run)
            stray = set()
        else:
            kills += 1
    assert not wait_for_empty_sessions(sessions)
    assert shared_memory_of_the_dead() <= memory
    print(f"{kills} kills with {workers} workers, {finished} runs finished, all equal")


def test_death_at_every_file_operation_of_a_run(tmp_path: Path, launcher: Launcher) -> None:
    """R08: from an empty place to the average and the score of the test set, wherever it dies."""
    case = Case(tmp_path, launcher, steps=3)
    number = 0
    for ended, what in struck(case, case.argv(), Fault(str(case.run), "death")):
        again = launcher.run(case.argv())
        assert again.status == 0, f"{what}:\n{again.err}"
        if "is finished" not in again.err:
            assert not leftovers(case.run), what
        case.check_finished(what)
        assert ended.status == DEATH
        number += 1
    assert number > 200


@pytest.mark.parametrize(("number", "sticky"), [(errno.ENOSPC, True), (errno.EIO, False)])
def test_every_file_operation_of_a_run_fails(
    tmp_path: Path, launcher: Launcher, number: int, sticky: bool
) -> None:
    """R09: one sentence, a status, no traceback; and the same command, when there is room again,
    comes to the same end."""
    case = Case(tmp_path, launcher, steps=3)
    fault = Fault(str(case.run), "error", number, sticky=sticky)
    for ended, what in struck(case, case.argv(), fault):
        assert ended.status in (0, 2, 3, 4) and not tracebacks(ended.err), f"{what}:\n{ended.err}"
        if ended.status:
            lines = [line for line in ended.err.splitlines() if line.startswith("error: ")]
            assert len(lines) == 1 and "cannot write" in lines[0], f"{what}: {lines}"
        again = launcher.run(case.argv())
        assert again.status == 0, f"{what}:\n{again.err}"
        case.check_finished(what)


def test_death_while_fresh_removes_a_run(tmp_path: Path, launcher: Launcher) -> None:
    """R13: of a run that was half removed some checkpoints stayed, and the next start, without
    --fresh, went on from what was left of it."""
    case = Case(tmp_path, launcher, steps=3)
    fault = Fault(str(case.run), "death")
    for _, what in struck(case, case.argv("--fresh"), fault, base=case.whole):
        again = launcher.run(case.argv())
        assert again.status == 0, f"{what}:\n{again.err}"
        found = differences(case.run, case.whole, case.steps)
        # Killed right after the log is gone, the old run is resumed without it.
        if records(case.run, "begin"):
            assert not found, what
        else:
            assert all(text.startswith("records of") for text in found), f"{what}: {found}"
        if "replace" in what:  # the new config.yaml: from here it is any first start
            return
    raise AssertionError("no config.yaml was written")


def struck(
    case: Case, argv: list[str], fault: Fault, base: Path | None = None
) -> Iterator[tuple[Ended, str]]:
    """The fault at the first, second, ... file operation, until the command comes to its end."""
    for at in itertools.count(1):
        shutil.rmtree(case.run, ignore_errors=True)
        if base is not None:
            shutil.copytree(base, case.run)
        ended = case.launcher.run(argv, replace(fault, at=at))
        if not ended.struck:
            return
        assert not wounds(case.run), ended.struck
        yield ended, f"{fault.kind} at operation {at}: {ended.struck}"
