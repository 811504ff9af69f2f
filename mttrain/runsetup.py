"""The run directory: when it is made, resumed or refused, and the vocabulary it holds.

    config.yaml      the resolved configuration, written before the first update
    tokenizer.json   or tokenizer.source.json and tokenizer.target.json
    log.jsonl        one record a line
    checkpoints/     see the module of that name
    data/            the encoded text, unless data.cache_dir says otherwise

A directory that holds a run is resumed when every changed key is one that may change; anything else
in the place of a run directory is left alone and refused.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from mttrain.checkpoint import Tokenizers
from mttrain.config import RunConfig, changed_keys, dump_config, load_config
from mttrain.corpus import atomic_write_text, read_lines
from mttrain.distributed import World
from mttrain.errors import ConfigError
from mttrain.runlog import RunLog
from mttrain.tokenizer import Tokenizer, train_tokenizer

CONFIG = "config.yaml"
SHARED, SOURCE, TARGET = "tokenizer.json", "tokenizer.source.json", "tokenizer.target.json"
OWN_NAMES = (CONFIG, SHARED, SOURCE, TARGET, "log.jsonl", "checkpoints", "data")

MAY_CHANGE = (
    "threads",
    "data.test",
    "data.workers",
    "data.cache_dir",
    "optim",
    "train.max_steps",
    "train.max_epochs",
    "train.max_time",
    "train.device",
    "train.precision",
    "train.valid_every",
    "train.valid_beam",
    "train.valid_samples",
    "train.log_every",
    "train.patience",
    "train.keep_last",
    "train.average",
    "train.average_of",
    "decode",
)
"""Keys and sections that take effect when a run is resumed; all others would make another run."""


def prepare_run_dir(config: RunConfig, *, fresh: bool) -> list[str]:
    """Make the directory, or check that the run in it may go on with these settings.

    Returns a line for each changed key that takes effect now. Raises ConfigError naming each key
    that may not change.
    """
    run_dir = Path(config.run_dir)
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError(f"run_dir {run_dir} is a file; name another directory.")
    path = run_dir / CONFIG
    changes: list[str] = []
    if path.exists() and fresh:
        _remove_run(run_dir)
    elif path.exists():
        changes = _allowed_changes(load_config(path), config, run_dir)
    elif run_dir.exists() and any(run_dir.iterdir()):
        raise ConfigError(
            f"run_dir {run_dir} is not empty and holds no {CONFIG}, so it is no run of ours; "
            "name another directory."
        )
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        text = dump_config(config)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            atomic_write_text(path, text)
    except OSError as error:
        raise ConfigError(f"run_dir {run_dir}: cannot write there: {error.strerror}.") from None
    return changes


def _remove_run(run_dir: Path) -> None:
    """Remove the files of a run and nothing else that may lie in its directory."""
    for name in OWN_NAMES:
        path = run_dir / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


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
    """Source and target tokenizer: the run's own, those of the configuration, or learned now.

    Rank 0 makes the files; the others read them. Raises TokenizerError and DataError.
    """
    run_dir = Path(config.run_dir)
    names = (SHARED, SHARED) if config.tokenizer.shared else (SOURCE, TARGET)
    if world.is_main and not all((run_dir / name).exists() for name in names):
        for name, tokenizer in _new_tokenizers(config, log).items():
            tokenizer.save(run_dir / name)
    world.barrier()
    source = Tokenizer.load(run_dir / names[0])
    return source, (source if config.tokenizer.shared else Tokenizer.load(run_dir / names[1]))


def _new_tokenizers(config: RunConfig, log: RunLog) -> dict[str, Tokenizer]:
    settings = config.tokenizer
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
        training_lines(config, sides), vocab_size=settings.vocab_size, level=settings.level
    )
    log.event("tokenizer", sides=list(sides), size=tokenizer.size, hash=tokenizer.hash)
    return tokenizer


def training_lines(config: RunConfig, sides: tuple[str, ...]) -> Iterator[str]:
    """All lines of the named sides of the training corpora."""
    for corpus in config.data.train:
        for side in sides:
            yield from read_lines(getattr(corpus, side))
