"""Walks over the file operations of a save, run in a child of the server of `fault_help`.

One process trains up to the validation before the save and forks a child for each case, which goes
on from there and is struck: it computes with one thread, so nothing is lost in a fork. Then every
directory that was left is resumed. Many operations leave a directory in the same state, which is
resumed once: fsync changes nothing, and what is in a temporary file is never read.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from mttrain.checkpoint import resolve_model, verify
from mttrain.cli import main
from mttrain.errors import CheckpointError
from tests.system.compare_help import differences, leftovers, wounds
from tests.system.fault_help import Fault, Faults


def walk(
    argv: list[str], base: str, whole: str, steps: int, faults: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """For each fault, and for the first, the second, ... operation until none is left: the command
    on a copy of `base` with the fault at that operation, the wounds, the command again, and in what
    the run then differs from `whole`."""
    plans = [Fault(**fault) for fault in faults]
    run = Path(plans[0].root)
    _restore(run, Path(base))
    told = list(_strike_all(argv, run, plans))
    seen: set[frozenset[str]] = set()
    for case in told:
        hurt = Path(case.pop("hurt"))
        state = _state(hurt, Path(base))
        if state in seen:
            shutil.rmtree(hurt)
            continue
        seen.add(state)
        shutil.rmtree(run, ignore_errors=True)
        hurt.rename(run)
        case["again"], case["again_err"] = main(argv), _said()
        case["leftovers"] = sorted(leftovers(run))
        case["differences"] = differences(run, Path(whole), steps) if case["again"] == 0 else []
    return told


def _strike_all(argv: list[str], run: Path, plans: list[Fault]) -> list[dict[str, Any]]:
    """Run the command once, and its end as often as there are operations to strike."""
    told: list[dict[str, Any]] = []
    parent = os.getpid()
    faults = Faults(replace(plans[0], at=0))
    reading, writing = os.pipe()

    def at_the_validation() -> None:
        calm = run.with_name("calm")
        shutil.copytree(run, calm)
        for plan in plans:
            for at in count(1):
                _restore(run, calm)
                pid = os.fork()
                if pid == 0:
                    faults.fault, faults.count = replace(plan, at=at), 0
                    faults.on_death = lambda: os.write(writing, f"{faults.struck}\n".encode())
                    return
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                case = {"at": at, "kind": plan.kind, "number": plan.number, "status": status}
                case |= {"struck": os.read(reading, 1 << 16).decode().strip(), "err": _said()}
                if not case["struck"]:
                    assert status == 0, case
                    break
                hurt = run.with_name(f"hurt-{len(told)}")
                case |= {"wounds": wounds(run) + _unusable(run), "hurt": str(hurt)}
                told.append(case)
                run.rename(hurt)
        shutil.rmtree(calm)
        raise SystemExit(0)

    faults.on_armed = at_the_validation
    with faults.installed():
        status = main(argv)
    if os.getpid() != parent:
        os.write(writing, f"{faults.struck}\n".encode())
        os._exit(status)
    assert status == 0 and told, _said()
    os.close(reading)
    os.close(writing)
    return told


def _restore(run: Path, base: Path) -> None:
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(base, run)


def _state(run: Path, base: Path) -> frozenset[str]:
    """Names of all files, and which have changed; of a log its lines, and whether one is torn."""
    lines = set()
    for path in run.rglob("*"):
        name = str(path.relative_to(run))
        old = base / name
        if path.name == "log.jsonl":
            *whole, torn = path.read_bytes().split(b"\n")
            name += f" {len(whole)} {torn != b''}"
        elif path.is_file() and not (old.exists() and old.read_bytes() == path.read_bytes()):
            name += " new"
        lines.add(re.sub(r"(\.tmp-\S*?)[0-9a-f]{8}\b", r"\1", name))
    return frozenset(lines)


def _said() -> str:
    """What stderr, which is a file, has got since the last call."""
    sys.stderr.flush()
    size = os.lseek(2, 0, os.SEEK_END)
    text = os.pread(2, size, 0).decode()
    os.ftruncate(2, 0)
    os.lseek(2, 0, os.SEEK_SET)
    return text


def _unusable(run: Path) -> list[str]:
    """Why `translate` could not work on the run now."""
    try:
        verify(resolve_model(run))
    except CheckpointError as error:
        return [str(error)]
    return []
