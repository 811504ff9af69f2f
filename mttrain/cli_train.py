"""The command `train`, and its result as JSON.

The result is read from the log of the run, which says more than the process at hand knows: a run
may have ended before it, and has its scores on record.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mttrain.cli_options import ConfigFile, Debug, Settings, opt
from mttrain.errors import ConfigError

if TYPE_CHECKING:
    from mttrain.config import RunConfig
    from mttrain.progress import TrainResult

Record = dict[str, Any]
_FRAME = ("kind", "time", "step")  # fields that every record has


def train(
    config: ConfigFile = None,
    settings: Settings = None,
    fresh: Annotated[bool, opt("--fresh", None, "Remove an earlier run of that name.")] = False,
    dry_run: Annotated[
        bool, opt("--dry-run", None, "Check text and sizes, try 20 updates, start no run.")
    ] = False,
    as_json: Annotated[bool, opt("--json", None, "Print the result as one JSON object.")] = False,
    debug: Debug = False,
) -> None:
    """Train a model, or resume the run whose directory exists."""
    if config is None:
        raise ConfigError("Name the configuration: --config X.yaml.")
    if fresh and dry_run:
        raise ConfigError("--dry-run starts no run, so --fresh has no effect; remove one.")
    from mttrain.config import load_config

    loaded = load_config(config, settings or ())  # before torch: mistakes show at once
    from mttrain import trainer
    from mttrain.corpus import write_lines

    result = trainer.train(loaded, fresh=fresh, dry_run=dry_run)
    # Under torchrun one process reports. The log has the scores too: a closed stdout costs nothing.
    if os.environ.get("RANK", "0") == "0" and sys.stdout is not None:
        if as_json:
            plain = _rehearsal(loaded, result) if dry_run else _result(result)
            write_lines(None, [json.dumps(plain, ensure_ascii=False, allow_nan=False)])
        elif result.scores:
            write_lines(None, [score.text() for score in result.scores])
    if result.exit_code:
        raise typer.Exit(result.exit_code)


def _rehearsal(config: RunConfig, result: TrainResult) -> Record:
    """What a dry run found: the corpus, the vocabularies learned, pairs that are skipped and why,
    the plan of an epoch, bytes of memory, and how long training takes."""
    records = result.records
    plain: Record = {"run_dir": config.run_dir, "reason": result.reason}
    plain["tokenizers"] = [_fields(r) for r in records if r["kind"] == "tokenizer"]
    for kind in ("corpus", "encoded", "plan", "memory", "estimate"):
        plain["epoch" if kind == "plan" else kind] = _fields(_last(records, kind))
    chosen = _last(records, "batch_tokens")
    plain["batch_tokens"] = config.train.batch_tokens if chosen is None else chosen["batch_tokens"]
    steps, updates = config.train.max_steps, plain["epoch"].get("updates_per_epoch")
    plain["epochs"] = None if steps is None or not updates else steps / updates
    return plain


def _result(result: TrainResult) -> Record:
    """How a run stands: where, why it ended, the best checkpoint, its scores and their signatures.

    validation: of the best checkpoint as it was chosen; test: a list of scores, empty when there is
    no test set or the run has not ended.
    """
    from mttrain.rundir import LOG
    from mttrain.runlog import read_log

    path = result.run_dir / LOG
    records = read_log(path) if path.is_file() else []
    end = _last(records, "end")
    test = _last(records, "test")
    current = end is not None and end.get("reason") == result.reason
    best = None if result.best is None else str(result.run_dir / "checkpoints" / result.best)
    return {
        "run_dir": str(result.run_dir),
        "reason": result.reason,
        "updates": max((r["step"] for r in records if isinstance(r.get("step"), int)), default=0),
        "seconds": end.get("elapsed") if current and end is not None else None,
        "best": result.best,
        "checkpoint": best,
        "validation": _validation(records, result.best),
        "test": [] if test is None or not current else test.get("scores", []),
        "resumed": any(record["kind"] == "resume" for record in records),
    }


def _validation(records: Sequence[Record], best: str | None) -> Record | None:
    """The record of the validation that the best checkpoint was chosen by."""
    if best is None:
        return None
    found = _last(records, "candidates") or {}
    for candidate in found.get("candidates", []):
        if candidate["name"] == best:
            return {"beam": found.get("beam"), **candidate["scores"]}
    wanted = int(best.removeprefix("step-")) if best.removeprefix("step-").isdecimal() else -1
    mine = [r for r in records if r["kind"] == "valid" and r.get("step") == wanted]
    plain = _fields(_last(mine, "valid"))
    plain.pop("samples", None)
    return plain or None


def _last(records: Sequence[Record], kind: str) -> Record | None:
    return next((record for record in reversed(records) if record["kind"] == kind), None)


def _fields(record: Record | None) -> Record:
    return {} if record is None else {k: v for k, v in record.items() if k not in _FRAME}
