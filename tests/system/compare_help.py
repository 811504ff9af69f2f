"""Whether a run is whole, whether two runs are equal to the bit, and how to damage one."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from mttrain.checkpoint import checkpoint_names, load_train_state, read_index, verify
from mttrain.errors import CheckpointError
from mttrain.runlog import read_log

CLOCK = frozenset(
    {
        "time", "seconds", "waiting", "elapsed", "tokens_per_second", "source_tokens_per_second",
        "nonpadding_per_second", "flops_per_second", "utilisation", "peak_flops", "peak_how",
        "peak_memory_mb",
    }
)  # fmt: skip
ONCE = ("corpus", "begin", "epoch", "train", "valid", "best", "candidates", "test", "end")
DAMAGES = ("cut", "flip", "empty")


def records(run: Path, *kinds: str) -> list[dict[str, Any]]:
    """Records of these kinds, without what a clock makes."""
    return [
        {key: value for key, value in record.items() if key not in CLOCK}
        for record in read_log(run / "log.jsonl")
        if record["kind"] in kinds
    ]


def state(run: Path, step: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Weights and optimiser by name; and position, best and patience."""
    folder = run / "checkpoints" / f"step-{step:08d}"
    saved = load_train_state(folder)
    tensors = {**saved.tensors, **load_file(folder / "model.safetensors")}
    progress = {k: v for k, v in saved.values["progress"].items() if k not in CLOCK}
    progress["window"] = {k: v for k, v in progress["window"].items() if k not in CLOCK}
    return tensors, {**saved.values, "progress": progress}


def differences(run: Path, whole: Path, step: int) -> list[str]:
    """In what a finished run is not the uninterrupted one; nothing, if all is well."""
    found = []
    (first, numbers), (second, others) = state(run, step), state(whole, step)
    if first.keys() != second.keys():
        found.append("names of tensors")
    found += [k for k in first if k in second and not torch.equal(first[k], second[k])]
    found += [k for k in numbers.keys() | others.keys() if numbers.get(k) != others.get(k)]
    found += _index(run, whole)
    for kind in ONCE:
        mine, theirs = (
            [{k: v for k, v in record.items() if k != "config"} for record in records(path, kind)]
            for path in (run, whole)
        )
        if mine != theirs:
            steps = ([record.get("step") for record in side] for side in (mine, theirs))
            found.append("records of {}: steps {} and {}".format(kind, *steps))
    return found


def _index(run: Path, whole: Path) -> list[str]:
    """A death before the removal of old checkpoints may leave one more, until the next save."""
    mine, theirs = read_index(run), read_index(whole)
    older = {name for name in checkpoint_names(run)[:-1] if name not in theirs.scores}
    kept = {name: scores for name, scores in mine.scores.items() if name not in older}
    same = replace(mine, scores=kept) == theirs
    return [] if same else [f"index: {mine} is not {theirs}"]


def wounds(run: Path) -> list[str]:
    """What is not whole in a run directory, whose process may have died anywhere."""
    found = []
    for name in checkpoint_names(run):
        try:
            verify(run / "checkpoints" / name)
        except CheckpointError as error:
            found.append(str(error))
    try:
        read_index(run)
    except CheckpointError as error:
        found.append(str(error))
    return found


def tracebacks(err: str) -> list[str]:
    """Tracebacks in what a process said; not those of an exception that Python had to ignore, which
    is what a signal becomes that arrives while an object is taken apart."""
    lines = ["", *err.splitlines()]
    return [
        line
        for before, line in pairwise(lines)
        if line.startswith("Traceback") and not before.startswith("Exception ignored in")
    ]


def leftovers(run: Path) -> set[str]:
    """Temporary files and folders, by their path in the run."""
    names = {path.relative_to(run) for kind in (".tmp-*", ".old-*") for path in run.rglob(kind)}
    return {str(name) for name in names}


def damage(path: Path, how: str, at: int | None = None) -> None:
    """Cut, empty, or flip a bit of a file; `at` is the byte, the middle if not given."""
    content = bytearray(path.read_bytes())
    at = len(content) // 2 if at is None else at
    if how == "flip":
        content[at] ^= 1
    path.write_bytes({"cut": content[:at], "flip": content, "empty": b""}[how])
