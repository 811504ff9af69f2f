"""A soak: train, hurt, damage, resume, translate, compare, for minutes and under random faults.

MTTRAIN_SOAK_SECONDS sets for how long (600), MTTRAIN_SEED the seed, which is printed.
"""

from __future__ import annotations

import errno
import os
import random
import secrets
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mttrain.checkpoint import checkpoint_names, read_index, read_meta, resolve_model, verify
from mttrain.config import dump_config
from mttrain.errors import CheckpointError
from tests.integration.training_help import random_sentences, tiny_config, write_pairs
from tests.system.compare_help import DAMAGES, damage, differences, tracebacks, wounds
from tests.system.fault_help import (
    DEATH,
    Child,
    Ended,
    Fault,
    Launcher,
    shared_memory_of_the_dead,
    wait_for_empty_sessions,
)

pytestmark = pytest.mark.slow

SECONDS = float(os.environ.get("MTTRAIN_SOAK_SECONDS") or 600)
SEED = int(os.environ.get("MTTRAIN_SEED") or secrets.randbelow(2**31))
STEPS = 60
LINES = ["", "ba be bi", "so", "unseen words, and 你好", "  ", "du di da de " * 5, "ta", "\tga"]
KINDS = (
    "kill -9",
    "SIGTERM",
    "SIGINT",
    "two signals",
    "write errors",
    "full disk",
    "death",
    "none",
)


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    (tmp_path / "children").mkdir()
    with Launcher(tmp_path / "children") as server:
        yield server


class Soak:
    """One run after the other, hurt until it is finished and compared; counts what was done."""

    def __init__(self, folder: Path, launcher: Launcher) -> None:
        self.folder, self.launcher, self.chooser = folder, launcher, random.Random(SEED)
        self.run, self.whole, self.all = (folder / name for name in ("run", "whole", "all"))
        self.faults: Counter[str] = Counter()
        self.done: Counter[str] = Counter()
        self.sessions: list[int] = []
        self.damaged: Path | None = None  # the newest checkpoint, as long as it is
        self.warned = False  # whether a start has said so
        self.argv: list[str] = []
        self._texts: dict[str, list[str]] = {}
        self._prepare()

    def _prepare(self) -> None:
        """The uninterrupted run; and once more with all its checkpoints kept, to translate with."""
        lines = random_sentences(50, seed=5)
        data: dict[str, Any] = {
            "train": write_pairs(self.folder, "train", [(line, line) for line in lines]),
            "valid": write_pairs(self.folder, "valid", [(line, line) for line in lines[:4]]),
        }
        train = {
            "max_steps": STEPS, "valid_every": 2, "log_every": 3, "accumulate": 2,
            "keep_last": 3, "average": 2, "best_metric": "chrf",
        }  # fmt: skip
        model = {"d_model": 16, "d_ff": 32, "num_heads": 2}
        config = tiny_config(self.folder, data, train=train, model=model)
        path = self.folder / "run.yaml"
        path.write_text(dump_config(config.model_copy(update={"threads": 1})))
        (self.folder / "input").write_text("".join(f"{line}\n" for line in LINES), encoding="utf-8")
        self.argv = ["train", "--config", str(path)]
        every = ["--set", "train.valid_every=1", "--set", "train.keep_last=1000"]
        for run, settings in ((self.all, every), (self.whole, [])):
            start = time.monotonic()
            ended = self.launcher.run([*self.argv, "--set", f"run_dir={run}", *settings])
            assert ended.status == 0, ended.err
        self.span = time.monotonic() - start

    def until(self, deadline: float) -> None:
        while time.monotonic() < deadline or self.run.exists():
            late = time.monotonic() > deadline
            if not self.run.exists():
                self.workers = self.chooser.choice((0, 0, 1, 2))
                self.done["started"] += 1
            kind = "none" if late else self.chooser.choice(KINDS)
            self.check(self.hurt(kind), kind)

    # ---- hurting -----------------------------------------------------------------------------

    def hurt(self, kind: str) -> Ended:
        """Start, resume or finish the run under a fault of this kind."""
        chooser, root = self.chooser, str(self.run)
        fault = {
            "write errors": lambda: Fault(
                root, "error", chooser.choice((errno.EIO, errno.ENOSPC)),
                chance=chooser.choice((0.002, 0.01, 0.05)), seed=chooser.randrange(2**31),
            ),
            "full disk": lambda: Fault(root, "error", at=chooser.randint(1, 300), sticky=True),
            "death": lambda: Fault(
                root, "death", at=chooser.randint(1, 300), half=chooser.random() < 0.5
            ),
        }.get(kind)  # fmt: skip
        child = self.launcher.start(
            [*self.argv, "--set", f"data.workers={self.workers}"], fault() if fault else None
        )
        self.sessions.append(child.pid)
        signals: dict[str, Callable[[], None]] = {
            "kill -9": lambda: child.kill(signal.SIGKILL),
            "SIGTERM": lambda: child.kill(signal.SIGTERM),
            "SIGINT": lambda: child.kill(signal.SIGINT),
            "two signals": lambda: self._twice(child),
        }
        if kind in signals:
            self._pause(child)
            signals[kind]()
        ended = child.wait()
        hit = ended.struck or (kind in signals and ended.status != 0)
        self.faults[kind] += bool(hit)
        self.done["processes"] += 1
        self.done["resumed"] += "resuming after" in ended.err
        return ended

    def _pause(self, child: Child) -> None:
        """Until some moment between the first sign of life and the end."""
        wake = time.monotonic() + self.chooser.uniform(0, self.span)
        while not child.ended() and (time.monotonic() < wake or not child.err()):
            time.sleep(0.001)

    def _twice(self, child: Child) -> None:
        for number in self.chooser.choices((signal.SIGINT, signal.SIGTERM), k=2):
            child.kill(number)
            time.sleep(self.chooser.uniform(0, 0.03))

    def maybe_damage(self) -> None:
        """Damage a file of the newest checkpoint when the one before it can stand in."""
        names = checkpoint_names(self.run)[-2:]
        folders = [self.run / "checkpoints" / name for name in names]
        states = [(folder / "training.json").exists() for folder in folders]
        if self.chooser.random() > 0.2 or states != [True, True]:
            return
        file = self.chooser.choice(sorted(folders[-1].iterdir()))
        how = self.chooser.choice(DAMAGES)
        damage(file, how, self.chooser.randrange(file.stat().st_size))
        try:
            verify(folders[-1])
        except CheckpointError:
            self.damaged, self.warned = folders[-1], False
            self.faults["damaged checkpoint"] += 1

    # ---- checking ----------------------------------------------------------------------------

    def check(self, ended: Ended, kind: str) -> None:
        """Nothing is lost; then translate now and then, and damage."""
        what = f"MTTRAIN_SEED={SEED}, process {self.done['processes']}, {kind} ({ended.struck})"
        what += f", status {ended.status}, it said:\n{ended.err}\n"
        allowed = (0, 2, 3, 4, 130, 143, DEATH, -signal.SIGKILL, -signal.SIGINT, -signal.SIGTERM)
        assert ended.status in allowed, what
        assert not tracebacks(ended.err), what
        self.warned |= self.damaged is not None and f"warning: {self.damaged}" in ended.err
        if "resuming after" in ended.err:
            assert self.warned or not self.damaged, what
            self.damaged = None
        assert self.damaged or not wounds(self.run), f"{what}{wounds(self.run)}"
        if ended.status == 0:
            found = differences(self.run, self.whole, STEPS)
            assert not found, f"{what}{found}"
            self.translate(what)
            self.done["finished"] += 1
            shutil.rmtree(self.run)
            return
        if not self.damaged:
            if self.chooser.random() < 0.4:
                self.translate(what)
            self.maybe_damage()

    def translate(self, what: str) -> None:
        """With the best checkpoint: as many lines as went in, and the text of its update."""
        if not checkpoint_names(self.run):
            return
        folder = resolve_model(self.run)
        name = folder.name.removeprefix(".old-")
        step = read_meta(folder)["step"]
        assert name in ("average", f"step-{step:08d}"), what
        if name not in self._texts:
            reference = self.whole if name == "average" else self.all
            self._texts[name] = self._lines(reference / "checkpoints" / name, what)
        found = self._lines(self.run, what)
        assert found == self._texts[name], f"{what}{name}: {found} is not {self._texts[name]}"
        self.done["translated"] += 1

    def _lines(self, model: Path, what: str) -> list[str]:
        output = self.folder / "output"
        paths = ["--input", str(self.folder / "input"), "--output", str(output)]
        ended = self.launcher.run(["translate", "--model", str(model), *paths])
        assert ended.status == 0, f"{what}{ended.err}"
        lines = output.read_text(encoding="utf-8").split("\n")[:-1]
        assert len(lines) == len(LINES), f"{what}{lines}"
        blank = [out for line, out in zip(LINES, lines, strict=True) if not line.strip()]
        assert not any(blank), f"{what}{lines}"
        return lines


def test_soak(tmp_path: Path, launcher: Launcher, capsys: pytest.CaptureFixture[str]) -> None:
    """R08, R09, R10, R20, R22, R26: any order of faults, each after the other, and no loss."""
    with capsys.disabled():
        print(f"\nMTTRAIN_SEED={SEED}, {SECONDS:.0f} s")
    memory = shared_memory_of_the_dead()
    soak = Soak(tmp_path, launcher)
    soak.until(time.monotonic() + SECONDS)
    assert not wait_for_empty_sessions(soak.sessions)
    assert shared_memory_of_the_dead() <= memory
    assert read_index(soak.whole).best is not None
    faults = ", ".join(f"{kind} {count}" for kind, count in sorted(soak.faults.items()) if count)
    done = ", ".join(f"{count} {what}" for what, count in sorted(soak.done.items()))
    with capsys.disabled():
        print(f"faults: {faults}; runs: {done}; losses: 0; MTTRAIN_SEED={SEED}")
