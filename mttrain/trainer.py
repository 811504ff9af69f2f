"""The front door of training: may this directory be used, and is there anything left to do?

`train` looks before it writes: a run that is finished, locked, or holds other settings is left as
it is. The work itself is `run.Run`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from mttrain.boards import FOLDER, Board, require_tensorboard
from mttrain.config import DataConfig, RunConfig
from mttrain.distributed import World, joined_world
from mttrain.errors import ConfigError
from mttrain.metrics import bleu_tokenizer, require_tokenizer
from mttrain.progress import Progress, TrainResult, limit_reached
from mttrain.run import Run
from mttrain.rundir import (
    LOG,
    SHARED,
    SOURCE,
    STATE_VALUES,
    TARGET,
    checkpoint_names,
    read_json,
)
from mttrain.runlog import RunLog, read_log
from mttrain.runsetup import (
    STORE_FILE,
    check_beginning,
    check_run_dir,
    check_text_files,
    complete_config,
    goes_on,
    make_run_dir,
)
from mttrain.storefiles import LOCK


def train(config: RunConfig, *, fresh: bool = False, dry_run: bool = False) -> TrainResult:
    """Train as the configuration says, from the start or from where the run directory stands.

    `fresh` removes an earlier run in the same directory first. `dry_run` checks the corpus, says
    what training would do, tries some updates to say how long it takes, and leaves no file but
    encoded text in `data.cache_dir`. Raises ConfigError, DataError, CheckpointError and
    TrainingError.
    """
    if fresh and not dry_run:
        _refuse_to_empty_again()
    config = complete_config(config, fresh=fresh)
    check_text_files(config)
    for corpus in filter(None, (config.data.valid, config.data.test)):  # before hours of training
        require_tokenizer(bleu_tokenizer(config.data.langs_of(corpus)[1]))
    if config.train.tensorboard:
        require_tensorboard()
    if dry_run:
        return _rehearse(config, fresh)
    with joined_world(config.train.device) as world:
        return _train(config, world, fresh)


def _refuse_to_empty_again() -> None:
    """ConfigError where torchrun or Slurm starts the same command again: each start would remove
    what the one before has trained. Of restarts each node counts its own alone, so none can tell
    whether it is the first."""
    for name, remedy in (
        ("TORCHELASTIC_MAX_RESTARTS", "start torchrun with --max-restarts 0"),
        ("SLURM_RESTART_COUNT", "start a new job"),
    ):
        if int(os.environ.get(name) or 0) > 0:
            raise ConfigError(
                f"--fresh would empty the run again whenever this job is restarted ({name} is "
                f"{os.environ[name]}); remove run_dir and start without it, or {remedy}."
            )


def _train(config: RunConfig, world: World, fresh: bool) -> TrainResult:
    changes = check_run_dir(config, fresh=fresh)
    if goes_on(config, fresh=fresh):
        finished = _finished(config, changes, quiet=not world.is_main)
        if finished is not None:
            return finished
    else:
        check_beginning(config)
    world.barrier()  # every rank has looked before the first one writes
    with make_run_dir(config, fresh=fresh) if world.is_main else nullcontext():
        world.barrier()
        path = Path(config.run_dir) / LOG if world.is_main else None
        log = RunLog(path, quiet=not world.is_main)
        if config.train.tensorboard and world.is_main:
            log.mirror = Board(Path(config.run_dir) / FOLDER, log.say)
        return Run(config, world, log, changes).run()


def _rehearse(config: RunConfig, fresh: bool) -> TrainResult:
    """The dry run, in a directory of its own that is removed; under torchrun by one process."""
    if os.environ.get("RANK", "0") != "0":
        return TrainResult("dry_run", Path(config.run_dir), None)
    run_dir = Path(config.run_dir)
    begun = goes_on(config, fresh=fresh)
    check_run_dir(config, fresh=fresh)
    if not begun:
        check_beginning(config)
    with (
        tempfile.TemporaryDirectory() as folder,
        joined_world(config.train.device, alone=True) as world,
    ):
        data = _text_beside(config, Path(folder) / "data")
        config = config.model_copy(update={"run_dir": folder, "data": data})
        for name in (SHARED, SOURCE, TARGET):
            if begun and (run_dir / name).exists():
                shutil.copy(run_dir / name, folder)
        log = Path(folder) / LOG
        done = _progress(run_dir) if begun else Progress()
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        result = Run(config, world, RunLog(log)).rehearse(done, processes)
        return replace(result, records=read_log(log))


def _progress(run_dir: Path) -> Progress:
    """How far the run has come: what the newest of its states says."""
    folders = (run_dir / "checkpoints" / name for name in reversed(checkpoint_names(run_dir)))
    newest = next((folder for folder in folders if (folder / STATE_VALUES).exists()), None)
    if newest is None:
        return Progress()
    return Progress.from_dict(read_json(newest / STATE_VALUES)["progress"])


def _text_beside(config: RunConfig, folder: Path) -> DataConfig:
    """Where a dry run has its encoded text: in the cache, which the start then finds filled; or in
    `folder`, where links lead to what is in the run, which must not be written to."""
    run_dir = Path(config.run_dir).resolve()
    place = Path(config.data.cache_dir or run_dir / "data").resolve()
    if not place.is_relative_to(run_dir):
        return config.data
    folder.mkdir()
    for path in place.glob("*"):
        if STORE_FILE.fullmatch(path.name) and path.is_file() and path.suffix != LOCK:
            # An index is written anew, even through a link.
            borrow = shutil.copy if path.suffix == ".json" else os.symlink
            borrow(path, folder / path.name)
    return config.data.model_copy(update={"cache_dir": None})


def _finished(config: RunConfig, changes: Sequence[str], quiet: bool) -> TrainResult | None:
    """The result of a run that has nothing left to do, or None; no file is touched."""
    run_dir = Path(config.run_dir)
    path = run_dir / LOG
    ends = [r for r in read_log(path) if r["kind"] == "end"] if path.exists() else []
    if not ends:
        return None
    end = ends[-1]
    bad = end["bad_validations"]
    if not limit_reached(config.train, end["step"], end["epoch"], end["elapsed"], bad):
        return None
    log = RunLog(None, quiet=quiet)
    log.say(
        f"{run_dir} is finished ({end['reason']} after {end['step']} updates; best: "
        f"{end['best']}); raise train.{end['reason']} to go on, or use --fresh to start again"
    )
    for change in changes:
        log.say(f"warning: no effect on a finished run: {change}")
    return TrainResult(end["reason"], run_dir, end["best"])
