"""The run directory: when it is made, resumed or refused, and the vocabulary it holds.

    config.yaml      the resolved configuration, written before the first update
    tokenizer.json   or tokenizer.source.json and tokenizer.target.json
    log.jsonl        one record a line
    checkpoints/     see the module of that name
    data/            the encoded text, unless data.cache_dir says otherwise

A directory is a run of ours when its config.yaml begins with our mark. Until its first checkpoint
there is nothing to go on with: each start begins anew, with whatever settings and text it is given.
Then it is resumed when every changed key is one that may change; anything else in its place is left
alone and refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from mttrain.boards import FOLDER, remove_events
from mttrain.checkpoint import Tokenizers
from mttrain.config import (
    RunConfig,
    changed_keys,
    dump_config,
    load_config,
    with_batch_tokens,
)
from mttrain.corpus import atomic_write_text
from mttrain.dataconfig import pairs_kind
from mttrain.distributed import World
from mttrain.errors import ConfigError, DataError
from mttrain.origin import check_origin, origin_tokenizers, with_origin
from mttrain.pairs import parallel_text
from mttrain.rundir import (
    EXPORTS,
    LOG,
    SHARED,
    SOURCE,
    TARGET,
    mend_index,
    remove_leftover,
    remove_whole,
)
from mttrain.runlog import RunLog
from mttrain.shards import is_pattern
from mttrain.storefiles import NO_LOCKS
from mttrain.tokenizer import Tokenizer, train_tokenizer

CONFIG = "config.yaml"
MARK = "# The settings of a run, written by `mttrain train`; changing this file has no effect.\n"
LOCK = ".lock"
LEFTOVER = re.compile(r"\.tmp-\d+-([0-9a-f]{8}|log\.jsonl)")  # of a write that was killed
STORE_FILE = re.compile(r"(train|valid|test)-[0-9a-f]{16}\..*|\.tmp-.*")

MAY_CHANGE = (
    "threads",
    "data.test",
    "data.workers",
    "data.cache_dir",
    "optim",
    "train.parallel",
    "train.activation_checkpointing",
    "train.compile",
    "train.tf32",
    "train.accumulate",
    "train.max_steps",
    "train.max_epochs",
    "train.max_time",
    "train.device",
    "train.precision",
    "train.max_bad_updates",
    "train.valid_every",
    "train.valid_beam",
    "train.valid_samples",
    "train.log_every",
    "train.patience",
    "train.keep_last",
    "train.average",
    "train.average_of",
    "train.tensorboard",
    "decode",
)
"""Keys and sections that take effect when a run is resumed; all others would make another run."""


def check_run_dir(config: RunConfig, *, fresh: bool) -> list[str]:
    """Check, without writing, that training with these settings may use its directory; `fresh`
    would empty a run first.

    Returns a line for each changed key of a run that would be resumed. Raises ConfigError when
    something else is in the way, naming each key that may not change.
    """
    run_dir = Path(config.run_dir)
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError(f"run_dir {run_dir} is a file; name another directory.")
    if goes_on(config, fresh=fresh):
        return _allowed_changes(load_config(run_dir / CONFIG), config, run_dir)
    if is_run(run_dir):
        return []
    if run_dir.exists() and any(not _is_beginning(entry.name) for entry in run_dir.iterdir()):
        raise ConfigError(
            f"run_dir {run_dir} is not empty and holds no {CONFIG} of a run of ours; name another "
            "directory."
        )
    return []


def _is_beginning(name: str) -> bool:
    """Whether this may lie in the directory of a run that was killed before its config.yaml."""
    return name == LOCK or LEFTOVER.fullmatch(name) is not None


def goes_on(config: RunConfig, *, fresh: bool) -> bool:
    """Whether there is a run in the directory that training would go on with."""
    return not fresh and has_begun(Path(config.run_dir))


def complete_config(config: RunConfig, *, fresh: bool) -> RunConfig:
    """The configuration with what `train.init_from` decides, see `with_origin`, and with the batch
    that `train.batch_tokens: auto` found when the run began."""
    path = Path(config.run_dir) / CONFIG
    begun = load_config(path) if goes_on(config, fresh=fresh) else None
    if begun is not None and config.train.batch_tokens == "auto":
        found = begun.train.batch_tokens
        config = with_batch_tokens(config, found) if isinstance(found, int) else config
    return with_origin(config, begun)


def check_text_files(config: RunConfig) -> None:
    """Raise one DataError that names every text file that is missing or empty, with its key."""
    problems = []
    for name, corpus in config.data.named_corpora():
        for side, file in corpus.named_files().items():
            path = Path(file)
            if is_pattern(file):
                continue
            if side == "pairs" and pairs_kind(file) == "sacrebleu":
                parallel_text(corpus, config.data)  # fetched now, or told now
                continue
            if not path.exists():
                problem = f"no such file (relative to {Path.cwd()})"
            elif path.is_dir():
                problem = "is a directory; name a text file"
            elif path.is_file() and path.stat().st_size == 0:
                problem = "is empty; give a file with text"
            else:
                continue
            problems.append(f"data.{name}.{side}: {path}: {problem}")
        if any(map(is_pattern, corpus.named_files().values())):
            try:
                parallel_text(corpus, config.data)
            except DataError as error:
                problems.append(f"data.{name}: {error}")
    if problems:
        raise DataError("\n".join(problems))


def is_run(run_dir: Path) -> bool:
    """Whether the directory is one that `mttrain train` made."""
    try:
        with open(run_dir / CONFIG, encoding="utf-8") as file:
            return file.readline(len(MARK) + 1) == MARK
    except (OSError, UnicodeDecodeError):
        return False


def has_begun(run_dir: Path) -> bool:
    """Whether the directory is a run that has something to go on with: a checkpoint, whole or half
    replaced."""
    saved = (run_dir / "checkpoints").glob("*")
    return is_run(run_dir) and any(not path.name.startswith(".tmp-") for path in saved)


def make_run_dir(config: RunConfig, *, fresh: bool) -> IO[str]:
    """Make the directory of a new run, or take over an old one; `fresh` empties that first.

    What a process that was killed here left behind is put right. The file that is returned holds
    the lock: while it is open, no other process trains here.
    """
    run_dir = Path(config.run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = _locked(run_dir)
        try:
            if fresh and is_run(run_dir):
                _remove_run(run_dir)
            _put_right(config)
            if not has_begun(run_dir):
                _remove_vocabulary(run_dir)  # of other settings, or of text since corrected
                write_config(config)
        except BaseException:
            lock.close()
            raise
    except OSError as error:
        raise ConfigError(f"run_dir {run_dir}: cannot write there: {error.strerror}.") from None
    return lock


def _put_right(config: RunConfig) -> None:
    """Remove temporary files, and bring the index of the checkpoints up to date; needs the lock."""
    run_dir = Path(config.run_dir)
    for path in run_dir.iterdir():
        if LEFTOVER.fullmatch(path.name):
            remove_leftover(path)
    if config.data.cache_dir is None:  # a cache may be shared with an encoder at work
        for path in (run_dir / "data").glob(".tmp-*"):
            remove_leftover(path)
    checkpoints = run_dir / "checkpoints"
    problem = mend_index(run_dir, config.train.best_metric)  # before what it may need is removed
    for pattern in (".tmp-*", ".old-*"):
        for path in checkpoints.glob(pattern):
            remove_leftover(path)
    if problem is not None:
        RunLog(None).say(f"warning: {problem} It was made again from the checkpoints.")


def write_config(config: RunConfig) -> None:
    """Write the resolved configuration unless it stands there already."""
    path, text = Path(config.run_dir) / CONFIG, MARK + dump_config(config)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        atomic_write_text(path, text)


def _locked(run_dir: Path) -> IO[str]:
    """An exclusive lock that the system lets go when the process ends, however it ends."""
    lock = open(run_dir / LOCK, "a+", encoding="utf-8")  # noqa: SIM115  # open as long as the run
    try:
        _lock(lock, run_dir)
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
    except BaseException:
        with contextlib.suppress(OSError):
            lock.close()
        raise
    _locks.add(lock)
    return lock


def _lock(lock: IO[str], run_dir: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        raise ConfigError(
            f"run_dir {run_dir} is in use by another training (process {lock.read().strip()}); "
            "wait for it, or choose another run_dir."
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        RunLog(None).say(
            f"warning: run_dir {run_dir} is on a file system without locks; nothing keeps a second "
            "training out of it."
        )


_locks: weakref.WeakSet[IO[str]] = weakref.WeakSet()


def _leave_the_run() -> None:
    """In a process forked from one that trains, a loader worker: let go of the lock.

    The open file is inherited and with it the lock: the next start after a kill was refused in the
    name of a dead process.
    """
    for lock in list(_locks):
        lock.close()


os.register_at_fork(after_in_child=_leave_the_run)


def _remove_run(run_dir: Path) -> None:
    """Remove the files of a run and nothing else that may lie in its directory."""
    (run_dir / LOG).unlink(missing_ok=True)
    if (run_dir / "checkpoints").is_dir():
        remove_whole(run_dir / "checkpoints", into=run_dir)
    _remove_vocabulary(run_dir)
    for made in (run_dir / EXPORTS).glob("ctranslate2-*-*"):  # by `translate --engine`
        remove_whole(made, into=run_dir)
    remove_events(run_dir / FOLDER)
    store = run_dir / "data"
    if store.is_dir():
        for path in store.iterdir():
            if STORE_FILE.fullmatch(path.name):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        if not any(store.iterdir()):
            store.rmdir()
    (run_dir / CONFIG).unlink()  # last: until then it is a run, and may be removed again


def _remove_vocabulary(run_dir: Path) -> None:
    for name in (SHARED, SOURCE, TARGET):
        (run_dir / name).unlink(missing_ok=True)


def _allowed_changes(old: RunConfig, new: RunConfig, run_dir: Path) -> list[str]:
    # A run that was moved has another run_dir and is the same run.
    changed = {k: v for k, v in changed_keys(old, new).items() if k != "run_dir"}
    lines = {key: f"{key}: {before} -> {after}" for key, (before, after) in changed.items()}
    refused = [f"  {line}" for key, line in lines.items() if not _may_change(key)]
    if refused:
        raise ConfigError(
            f"run_dir {run_dir} holds a run with other settings, which cannot be resumed:\n"
            + "\n".join(refused)
            + "\nSet these back, choose another run_dir, or start again with --fresh."
        )
    return list(lines.values())


def _may_change(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in MAY_CHANGE)


# ---- vocabulary -------------------------------------------------------------------------------


def tokenizers_of_run(config: RunConfig, world: World, log: RunLog) -> Tokenizers:
    """Source and target tokenizer: the run's own, those of the configuration or of the checkpoint
    that training begins with, or learned now.

    Rank 0 makes the files; the others read them. Raises TokenizerError and DataError.
    """
    run_dir = Path(config.run_dir)
    names = (SHARED, SHARED) if config.tokenizer.shared else (SOURCE, TARGET)
    if world.is_main and not all((run_dir / name).exists() for name in names):
        made = _new_tokenizers(config, log)
        _check_vocabulary(config, *(made[name] for name in names))
        for name, tokenizer in made.items():
            tokenizer.save(run_dir / name)
    world.wait_for_main("vocabulary")
    source = Tokenizer.load(run_dir / names[0])
    return source, (source if config.tokenizer.shared else Tokenizer.load(run_dir / names[1]))


def _new_tokenizers(config: RunConfig, log: RunLog) -> dict[str, Tokenizer]:
    settings = config.tokenizer
    if config.train.init_from is not None:
        source, target = origin_tokenizers(config)
        return {SHARED: source} if settings.shared else {SOURCE: source, TARGET: target}
    if settings.shared:
        return {SHARED: _tokenizer(config, settings.path, ("source", "target"), log)}
    return {
        SOURCE: _tokenizer(config, settings.source_path, ("source",), log),
        TARGET: _tokenizer(config, settings.target_path, ("target",), log),
    }


def _tokenizer(
    config: RunConfig, path: str | None, sides: tuple[str, ...], log: RunLog
) -> Tokenizer:
    if path is not None:
        return Tokenizer.load(path)
    settings = config.tokenizer
    log.say(f"learning a vocabulary of {settings.vocab_size} from the training text")
    tokenizer = train_tokenizer(
        training_lines(config, sides),
        vocab_size=settings.vocab_size,
        level=settings.level,
        tags=list(config.data.train_tags()) if "source" in sides else (),
    )
    if tokenizer.size < settings.vocab_size:
        log.say(f"the text gives no more than {tokenizer.size} entries")
    log.event("tokenizer", sides=list(sides), size=tokenizer.size, hash=tokenizer.hash)
    return tokenizer


def check_beginning(config: RunConfig) -> None:
    """What a new run begins with, looked at whole before its directory is made or emptied.

    Raises ConfigError and CheckpointError.
    """
    run_dir = Path(config.run_dir).resolve()
    named = config.tokenizer
    for key in ("path", "source_path", "target_path"):
        value = getattr(named, key)
        if value is not None and Path(value).resolve().is_relative_to(run_dir):
            raise ConfigError(
                f"tokenizer.{key} {value} lies in run_dir {config.run_dir}, which --fresh empties; "
                "copy it elsewhere first."
            )
    if config.train.init_from is not None:
        check_origin(config)
        _check_vocabulary(config, *origin_tokenizers(config))


def _check_vocabulary(config: RunConfig, source: Tokenizer, target: Tokenizer) -> None:
    """ConfigError when a given source vocabulary lacks tags of the corpora, or one of the two
    cannot be cut as BPE-dropout does."""
    named, origin = config.tokenizer, config.train.init_from
    where = f"train.init_from {origin}" if origin else f"{named.path or named.source_path}"
    if named.dropout > 0 and (source.of_characters or target.of_characters):
        raise ConfigError(
            f"{where}: its tokens are characters, which tokenizer.dropout would cut into bytes; "
            "remove tokenizer.dropout."
        )
    missing = [tag for tag in config.data.train_tags() if tag not in source.tags]
    if not missing:
        return
    remedy = "a vocabulary cannot grow, so remove these tags, or train from the beginning"
    if not origin:
        options = " ".join(f"--tag {tag}" for tag in missing)
        remedy = f"make one with `mttrain tokenize {options} ...`, or let the run learn its own"
    raise ConfigError(
        f"{where}: its source vocabulary lacks the tags of data.train: {', '.join(missing)}; "
        f"{remedy}."
    )


def training_lines(config: RunConfig, sides: tuple[str, ...]) -> Iterator[str]:
    """All lines of the named sides of the training corpora."""
    for corpus in config.data.train:
        text = parallel_text(corpus, config.data)
        for side in sides:
            yield from text.side(side)
