"""The engine option: a checkpoint as a CTranslate2 directory, made once and kept.

The directory lies in `exports/` of the run, or, where that cannot be written and for a checkpoint
outside a run, in the user's cache directory, or at last in a temporary one of this process. Its
name holds a hash of the weights, the vocabularies, the model settings and the type of the new
weights: another checkpoint, or a checkpoint whose files were replaced, never finds it. What is
found is verified (module `ct2_files`); what is damaged is made again. One process makes, others
wait for it. Anybody may remove these directories.

Price: a reading of the checkpoint's weights for their hash at each start, and the first time an
export without a comparison of texts: pairs of random ids are scored by both.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from mttrain.checkpoint import read_meta
from mttrain.corpus import file_sha256
from mttrain.ct2 import probe, write_ctranslate2
from mttrain.ct2_engine import Verified, choose_compute, load_exported, load_verified
from mttrain.ct2_files import FORMAT, is_exported, require_ctranslate2, verified
from mttrain.errors import CheckpointError, DataError
from mttrain.exporting import new_directory, run_directory
from mttrain.rundir import EXPORTS, WEIGHTS, remove_whole, resolve_model
from mttrain.translator import Translator

_LAYOUT = 1  # of the exported directory; another number: earlier ones are not found


def load_ctranslate2(
    model: str | Path,
    *,
    device: str = "auto",
    precision: str = "auto",
    threads: int | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Translator:
    """The model of a run, a checkpoint or an exported directory, behind CTranslate2.

    `tell` hears, in a sentence, when a directory is made. MissingDependency without the library;
    ConfigError for a device or precision that it has not; CheckpointError as for `load_model`.
    """
    library = require_ctranslate2()
    choose_compute(library, device, precision)  # refused before anything is made
    if is_exported(model):
        return load_exported(model, device=device, precision=precision, threads=threads)
    checkpoint = resolve_model(model)
    found = _cached(library, checkpoint, "int8" if precision == "int8" else None, tell)
    described = replace(found[0], path=checkpoint)  # where the model is from, for messages
    folder = found[0].path
    return load_verified(
        folder, (described, found[1]), device=device, precision=precision, threads=threads
    )


def _cached(
    library: Any, checkpoint: Path, quantization: str | None, tell: Callable[[str], None]
) -> Verified:
    """The verified directory for this checkpoint and type of weights, made if need be."""
    name = f"{FORMAT}-{quantization or 'float32'}-{_key(checkpoint, quantization)}"
    for root in _roots(checkpoint):
        folder = root / name
        found = _whole(folder)
        if found is not None:
            return found
        with contextlib.suppress(OSError, DataError), _locked(root):
            found = _whole(folder)  # somebody made it while we waited
            if found is None:
                tell(f"making {folder} for CTranslate2, once for this checkpoint")
                if folder.exists():
                    _remove_damaged(folder)
                _make(library, checkpoint, folder, quantization)
                found = verified(folder)
            return found
    # Nothing could be written: for this process alone.
    root = Path(tempfile.mkdtemp(prefix="mttrain-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    tell("the CTranslate2 directory can be kept nowhere; it is made for this command alone")
    _make(library, checkpoint, root / name, quantization)
    return verified(root / name)


def _whole(folder: Path) -> Verified | None:
    """What is in the directory, if it is there and as it was written."""
    with contextlib.suppress(CheckpointError):
        return verified(folder)
    return None


def _remove_damaged(folder: Path) -> None:
    try:
        remove_whole(folder)
    except CheckpointError as error:  # it cannot be moved: another place is looked for
        raise DataError(str(error)) from None


def _make(library: Any, checkpoint: Path, folder: Path, quantization: str | None) -> None:
    native = Translator.load(checkpoint, device="cpu", precision="fp32")
    with new_directory(folder, replace=False) as aside:
        write_ctranslate2(library, native.bundles[0], aside, quantization)
        exported = load_exported(aside, device="cpu")
        probe(native, exported, exact=quantization is None)


def _key(checkpoint: Path, quantization: str | None) -> str:
    """A hash of all that decides the content of the directory."""
    meta = read_meta(checkpoint)
    # The file itself and not what meta.json says of it: a damaged one is then no old acquaintance.
    weights = file_sha256(checkpoint / WEIGHTS) if (checkpoint / WEIGHTS).is_file() else ""
    parts = [_LAYOUT, weights, meta["model"], meta["tokenizer_hash"], meta.get("max_length")]
    text = json.dumps([*parts, quantization], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _roots(checkpoint: Path) -> Iterator[Path]:
    """Where directories are kept, the best place first."""
    run = run_directory(str(checkpoint))
    if run is not None:
        yield run / EXPORTS
    with contextlib.suppress(RuntimeError):  # nobody's home
        base = os.environ.get("XDG_CACHE_HOME")
        yield (Path(base) if base else Path.home() / ".cache") / "mttrain"


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    """The only maker in this folder, which is made if it is not there; OSError if it cannot be."""
    root.mkdir(parents=True, exist_ok=True)
    with open(root / ".lock", "a") as file:
        with contextlib.suppress(OSError):  # not every file system has locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
