"""Measure ways to train on one machine: processes, sharding, recomputation, compiled layers.

    python scripts/bench_ranks.py --config configs/multi30k_en_de.yaml --rounds 3
    python scripts/bench_ranks.py --config configs/wmt14_en_de_base.yaml --processes 8 --device cuda

Every way trains the same model from the same start on the same batches of an update: with
`--processes` N, each takes one Nth of the tokens. The ways take turns (A B C A B C ...), each round
gives ratios to the first of them, one process, and the median ratio counts. Rates are target
tokens a second by the log of the command, without the first updates. Nothing else may compute
meanwhile. The table goes to stdout, talk to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_setup import BenchError, median, run, say, table

from mttrain.rundir import LOG
from mttrain.runlog import read_log

FIRST = "one process"
WAYS: dict[str, dict[str, Any]] = {
    FIRST: {},
    "recomputed": {"train.activation_checkpointing": True},
    "compiled": {"train.compile": True},
    "ddp": {"train.parallel": "ddp"},
    "fsdp": {"train.parallel": "fsdp"},
}


def command(way: str, run_dir: Path, arguments: argparse.Namespace) -> list[str]:
    """The command that trains in this way for the updates that are measured."""
    count = arguments.processes if "train.parallel" in WAYS[way] else 1
    settings: dict[str, Any] = {
        "run_dir": str(run_dir),
        "data.cache_dir": str(arguments.cache),
        "train.device": arguments.device,
        "train.batch_tokens": arguments.batch_tokens // count,
        "train.max_steps": arguments.skip + arguments.updates,
        "train.valid_every": 10**9,
        "train.average": 0,
        "train.average_of": "last",
        "train.log_every": 1,
        "optim.warmup_steps": 1,
        "data.test": None,
        **WAYS[way],
    }
    if arguments.device == "cpu":
        settings["threads"] = arguments.threads // count
    options = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    launcher = [sys.executable, "-m"]
    if count > 1:
        launcher += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(count), "-m"]
    chosen = [part for option in (*options, *arguments.set) for part in ("--set", option)]
    return [*launcher, "mttrain", "train", "--config", arguments.config, *chosen]


def measured(way: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Target tokens a second and peak memory of the process with rank 0, in MB."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        run(command(way, run_dir, arguments), dict(os.environ), limit=3600.0)
        updates = [r for r in read_log(run_dir / LOG) if r["kind"] == "train"]
    before, counted = updates[arguments.skip - 1], updates[arguments.skip :]
    seconds = counted[-1]["seconds"] - before["seconds"]
    found = {
        "rate": sum(record["target_tokens"] for record in counted) / seconds,
        "memory": float(counted[-1]["peak_memory_mb"]),
    }
    say(f"{way}: {found['rate']:,.0f} target tokens/s, {found['memory']:,.0f} MB")
    return found


def rows(found: dict[str, list[dict[str, float]]]) -> list[list[Any]]:
    """Of each way its median rate, its ratio to the first way with the range, and its memory."""
    table_rows = []
    for way, results in found.items():
        if len(results) == 0:
            continue
        pairs = zip(results, found[FIRST], strict=False)
        ratios = [one["rate"] / first["rate"] for one, first in pairs]
        span = f"{min(ratios):.2f} to {max(ratios):.2f}"
        rate = median(result["rate"] for result in results)
        memory = int(median(result["memory"] for result in results))
        table_rows.append([way, round(rate), f"{median(ratios):.2f}", span, memory])
    return table_rows


def main() -> int:
    arguments = parsed(sys.argv[1:])
    found: dict[str, list[dict[str, float]]] = {way: [] for way in arguments.ways}
    for number in range(arguments.rounds):
        for way in list(found):
            say(f"round {number + 1} of {arguments.rounds}: {way}")
            try:
                found[way].append(measured(way, arguments))
            except BenchError as error:
                if way == FIRST:
                    raise
                say(f"{way}: {error}")
                del found[way]
    title = f"{Path(arguments.config).name}, {arguments.batch_tokens} tokens an update"
    head = ["way", "target tokens/s", "to the first", "of all rounds", "MB of rank 0"]
    print(table(title, head, rows(found)))
    return 0


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--config", required=True, help="run configuration whose model and text are used")
    add("--processes", type=int, default=2, help="of ddp and fsdp (default: 2)")
    add("--threads", type=int, default=os.cpu_count(), help="of all processes (default: all cores)")
    add("--device", default="cpu", choices=["cpu", "cuda"])
    add("--batch-tokens", type=int, default=4096, help="of an update (default: 4096)")
    add("--updates", type=int, default=40, help="that are measured (default: 40)")
    add("--skip", type=int, default=10, help="updates before them (default: 10)")
    add("--rounds", type=int, default=3)
    add("--ways", nargs="+", default=list(WAYS), choices=list(WAYS), metavar="WAY",
        help="of " + ", ".join(WAYS))  # fmt: skip
    add("--cache", type=Path, default=Path(tempfile.gettempdir()) / "mttrain-bench-cache",
        help="directory of encoded text, kept")  # fmt: skip
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="another setting")
    arguments = parser.parse_args(words)
    arguments.ways = [FIRST, *(way for way in arguments.ways if way != FIRST)]
    return arguments


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchError as error:
        sys.exit(f"error: {error}")
