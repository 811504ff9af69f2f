"""The folder of checkpoints in a run directory: names, index, which one is meant, which ones stay.

    run/checkpoints/index.json      which checkpoint is last and best, and the scores of all
    run/checkpoints/step-00001000/  checkpoints (module checkpoint); also average/
    run/checkpoints/.tmp-*, .old-*  leftovers of a save that was killed; removed by `prune`

The index names folders beside it and holds no path, so a run can be moved or copied; there are no
links. What it says of a checkpoint stands in that one's meta.json too, from which `mend_index`
makes it again. Files are JSON, of limited size when read: nobody's index or meta.json can do more
than be refused. Nothing here needs torch.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mttrain.corpus import atomic_write_text, load_json
from mttrain.errors import CheckpointError, DataError

WEIGHTS, META, INDEX = "model.safetensors", "meta.json", "index.json"
STATE_TENSORS, STATE_VALUES = "training.safetensors", "training.json"
SHARED, SOURCE, TARGET = "tokenizer.json", "tokenizer.source.json", "tokenizer.target.json"
LOG = "log.jsonl"
EXPORTS = "exports"  # models made for other programs, of checkpoints of this run
LOWER_IS_BETTER = frozenset({"nll"})

_JSON_LIMIT = 16 << 20  # bytes; a hundred times what a checkpoint writes
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # one folder below checkpoints/
_STEP = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, slots=True)
class Index:
    """Names of the last and the best checkpoint, and the scores of each, by metric name."""

    metric: str = "bleu"
    last: str | None = None
    best: str | None = None
    scores: dict[str, dict[str, float]] = field(default_factory=dict)

    def added(self, name: str, scores: Mapping[str, float]) -> Index:
        """The index after checkpoint `name` was saved with these scores (none: not validated)."""
        known = {old: values for old, values in self.scores.items() if old != name}
        index = replace(self, last=name, scores=known | {name: dict(scores)})
        ranked = index.ranked()
        return replace(index, best=ranked[0] if ranked else None)

    def ranked(self) -> list[str]:
        """Names from best to worst by `metric`; of equal ones the older first.

        A score that is missing, NaN or infinite takes no part.
        """
        values = {name: scores.get(self.metric, math.nan) for name, scores in self.scores.items()}
        finite = [name for name, value in values.items() if math.isfinite(value)]
        sign = 1.0 if self.metric in LOWER_IS_BETTER else -1.0
        return sorted(finite, key=lambda name: sign * values[name])


def read_index(run_dir: Path) -> Index:
    """The index of a run; an empty one when none was written yet."""
    path = run_dir / "checkpoints" / INDEX
    if not path.exists():
        return Index()
    content = read_json(path)
    names = [content.get("last"), content.get("best"), *typed_field(content, "scores", dict, path)]
    for name in names:
        if name is not None and not is_name(name):
            raise CheckpointError(f"{path}: {str(name)[:60]!r} is no checkpoint name.")
    scores = {
        name: {metric: value for metric, value in values.items() if _is_number(value)}
        for name, values in content["scores"].items()
        if isinstance(values, dict)
    }
    return Index(typed_field(content, "metric", str, path), names[0], names[1], scores)


def write_index(run_dir: Path, index: Index) -> None:
    """Replace `checkpoints/index.json` in one step."""
    path = run_dir / "checkpoints" / INDEX
    content = {
        "metric": index.metric,
        "last": index.last,
        "best": index.best,
        "scores": index.scores,
    }
    with write_refusals(path):
        atomic_write_text(path, finite_json(content))


def mend_index(run_dir: Path, metric: str) -> str | None:
    """Put into the index what a save did not live to write; make it again when it is unreadable.

    A save gives the checkpoint its name first. Killed before the index is written, it leaves a
    checkpoint whose scores only its own meta.json knows, and which is not validated a second time.
    Returns what was wrong with the file, or None. Only for whoever holds the lock of the run.
    """
    folder, problem = run_dir / "checkpoints", None
    restore_replaced(folder)
    try:
        old = read_index(run_dir) if (folder / INDEX).exists() else Index(metric)
    except CheckpointError as error:
        old, problem = Index(metric), str(error)
    index = old
    for name in checkpoint_names(run_dir):
        # The last one too: it may have been saved once more, with scores.
        if old.last is None or _number(name) >= _number(old.last):
            scores = _scores_in_meta(folder / name)
            if scores is not None and scores != old.scores.get(name):
                index = index.added(name, scores)
    if problem is not None or index != old:
        write_index(run_dir, index)
    return problem


def _scores_in_meta(folder: Path) -> dict[str, float] | None:
    """The scores that a checkpoint was saved with; None when its meta.json is damaged."""
    try:
        scores = typed_field(read_json(folder / META), "scores", dict, folder / META)
    except CheckpointError:
        return None
    return {metric: value for metric, value in scores.items() if _is_number(value)}


def prune(
    run_dir: Path, keep: Collection[str], *, keep_state: Collection[str] | None = None
) -> None:
    """Remove the `step-*` checkpoints named in neither collection, and leftovers of killed saves.

    Those that are kept and not in `keep_state` lose their training state (None: all keep it).
    """
    folder = run_dir / "checkpoints"
    restore_replaced(folder)
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        strip = keep_state is not None and path.name not in keep_state
        if path.name.startswith((".tmp-", ".old-")):
            remove_leftover(path)
        elif not _STEP.fullmatch(path.name) or not path.is_dir():
            continue
        elif path.name not in keep and (strip or keep_state is None):
            remove_whole(path)
        elif strip or not (path / STATE_VALUES).exists():
            with write_refusals(path):
                for name in (STATE_VALUES, STATE_TENSORS):  # without the first there is no state
                    (path / name).unlink(missing_ok=True)


def remove_whole(folder: Path, into: Path | None = None) -> None:
    """Remove a folder in one step, so that a kill leaves no half of it that could be read.

    into: the directory of its temporary name, its own one unless told. CheckpointError when it
    cannot be moved.
    """
    hidden = (into or folder.parent) / f".tmp-{os.getpid()}-{secrets.token_hex(4)}"
    with write_refusals(folder):
        folder.rename(hidden)
    remove_leftover(hidden)


def remove_leftover(path: Path) -> None:
    """Remove a temporary file or folder; what cannot be removed now is left for the next time."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def checkpoint_names(run_dir: Path) -> list[str]:
    """Names of the `step-*` checkpoints of a run, oldest first."""
    names = [path.name for path in _folders(run_dir / "checkpoints") if _STEP.fullmatch(path.name)]
    return sorted(names, key=_number)


def _number(name: str) -> int:
    """The update of a `step-*` name; -1 for any other."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else -1


def resolve_model(path: str | Path) -> Path:
    """The checkpoint directory that `path` means: itself, or the best (else the last) of a run."""
    path = Path(path)
    if (path / META).is_file():
        return path
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {what}; give a run directory or a checkpoint directory.")
    run_dir = path.parent if path.name == "checkpoints" else path
    index, names = read_index(run_dir), checkpoint_names(run_dir)
    name = index.best or index.last or (names[-1] if names else None)
    if name is None:
        raise CheckpointError(f"{path} holds no checkpoint (no {META}, no checkpoints/).")
    folder = run_dir / "checkpoints" / name
    replaced = folder.with_name(f".old-{name}")
    if not (folder / META).is_file() and (replaced / META).is_file():
        return replaced  # its replacement was killed between the two renames
    if not (folder / META).is_file():
        others = f"give one of {', '.join(names[-3:])} there" if names else "restore it"
        raise CheckpointError(f"{folder} is named by {INDEX} but incomplete or missing; {others}.")
    if folder.is_symlink():
        raise CheckpointError(f"{folder} is a link, which {INDEX} may not name; give its own path.")
    return folder


def _folders(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []


def restore_replaced(folder: Path) -> None:
    """Give a checkpoint its name back whose replacement was killed between the two renames."""
    for path in _folders(folder):
        final = path.with_name(path.name.removeprefix(".old-"))
        if path.name.startswith(".old-") and not final.exists():
            with suppress(OSError):  # another rank of the same run was faster
                path.rename(final)


# ---- files ------------------------------------------------------------------------------------


def finite_json(content: Mapping[str, Any]) -> str:
    """JSON text that every reader takes: NaN and infinities (a score may be one) become null."""
    plain = json.loads(json.dumps(content), parse_constant=lambda _: None)
    return json.dumps(plain, indent=1, allow_nan=False) + "\n"


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of limited size."""
    try:
        content = load_json(path, _JSON_LIMIT)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read it: {error.strerror}.") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {str(error)[:100]}.") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object.")
    return content


def typed_field(content: Mapping[str, Any], name: str, kind: type, path: Path) -> Any:
    """The field of a JSON object read from `path`, if it has this type (a bool is no number)."""
    value = content.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise CheckpointError(f"{path}: {name} is missing or not of type {kind.__name__}.")
    return value


def _is_number(value: object) -> bool:
    """Whether this is a number that a float can hold; 10^400 is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def is_name(name: object) -> bool:
    """Whether this may be the name of a checkpoint: a plain folder name, no path."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


@contextmanager
def write_refusals(path: Path) -> Iterator[None]:
    """What the system or a library refuses to write, as one sentence."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"{path}: cannot write the checkpoint: {reason}.") from None
    except DataError as error:
        raise CheckpointError(f"{path}: cannot write the checkpoint: {error}") from None
