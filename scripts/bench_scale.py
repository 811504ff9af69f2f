"""Measure the store of encoded text and the loader over corpora of growing size.

    python scripts/bench_scale.py --pairs 1000000 10000000 --work /data/scale --json scale.json

For each size a corpus is generated (the same one each time, a shard at a time), and measured are:
encoding beside the bare `encode_batch` of the tokenizers library on the same text in the same
process, the memory of encoding, the plans of the epochs, the loader with collation over some
epochs, and the command `mttrain train`: its first start, its second one, and its memory over many
updates. Every measurement is a process of its own (bench_scale_tasks.py); nothing else may compute
meanwhile. Tables go to stdout, talk to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_setup import HERE, BenchError, last_of, run, say, table

TASKS = HERE / "bench_scale_tasks.py"
LIMIT = 6 * 3600.0  # seconds for one measurement
POLL = 0.05  # seconds between two looks at a growing log


def task(name: str, work: Path, **arguments: Any) -> dict[str, Any]:
    """Run a task in a fresh process and return what it found."""
    command = [sys.executable, TASKS, name, work, json.dumps(arguments)]
    finished = run(command, dict(os.environ), separate=True, limit=LIMIT)
    found: dict[str, Any] = json.loads(last_of(finished.output))
    say(f"{work.name}, {name}: {json.dumps(found)}")
    return found


# ---- the command ------------------------------------------------------------------------------


def settings(work: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """A run on the corpus with a model for trying things out: the text is what is measured."""
    return {
        "run_dir": str(work / "run"),
        "data": {
            "source_lang": "en",
            "target_lang": "de",
            "train": {
                "source": str(work / f"text-*.en{'.gz' * arguments.gz}"),
                "target": str(work / f"text-*.de{'.gz' * arguments.gz}"),
            },
            "valid": {"source": str(work / "valid.en"), "target": str(work / "valid.de")},
            "cache_dir": str(work / "store"),
            "workers": arguments.workers,
        },
        "tokenizer": {"path": str(work / "tokenizer.json")},
        "model": {
            "d_model": 16, "d_ff": 32, "num_heads": 2, "encoder_layers": 1, "decoder_layers": 1,
        },
        "train": {
            "batch_tokens": arguments.batch_tokens, "device": "cpu", "log_every": 1,
            "valid_every": 10**9, "valid_beam": 1, "average": 0, "max_steps": 1,
        },
        "decode": {"beam": 1},
    }  # fmt: skip


def anonymous_mb(process: int) -> float:
    """Memory of a process that is no file's, in MB; 0 when it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0.0
    found = [int(line.split()[1]) for line in lines if line.startswith("RssAnon:")]
    return found[0] / 1024 if found else 0.0


def train(config: Path, log: Path, steps: int) -> dict[str, Any]:
    """Train to an update; seconds to the first new one and to the end, and memory meanwhile."""
    before = updates(log)
    command = [sys.executable, "-m", "mttrain", "train", "--config", str(config)]
    command += ["--set", f"train.max_steps={steps}"]
    with tempfile.TemporaryFile("w+") as output:
        start, first, memory = time.perf_counter(), None, []
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        try:
            while process.poll() is None:
                if first is None and updates(log) > before:
                    first = time.perf_counter() - start
                if first is not None:
                    memory.append(anonymous_mb(process.pid))
                time.sleep(POLL if first is None else 0.5)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        seconds = time.perf_counter() - start
        output.seek(0)
        if process.returncode != 0:
            raise BenchError(f"mttrain train failed: {output.read()[-500:]}")
    if first is None:  # the log came with the end
        first = seconds
    memory = [value for value in memory if value]
    return {"first_update": first, "seconds": seconds, "memory": memory}


def updates(log: Path) -> int:
    """The last update that a log tells of; 0 without one."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 16)))
            lines = file.read().decode("utf-8", errors="replace").split("\n")[:-1]
    except OSError:
        return 0
    steps = [0]
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:  # the first one may be cut
            continue
        if record.get("kind") == "train":
            steps.append(record["step"])
    return max(steps)


# ---- tables -----------------------------------------------------------------------------------


def measure(pairs: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything about one size."""
    work = arguments.work / f"{pairs}"
    work.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"pairs": pairs}
    shared = {"pairs": pairs, "shards": arguments.shards, "vocab": arguments.vocab}
    found["text"] = task("text", work, packed=arguments.gz, **shared)
    found["encode"] = task("encode", work, bare=arguments.bare)
    loading = {"batch_tokens": arguments.batch_tokens, "workers": arguments.workers}
    found["load"] = task("load", work, epochs=arguments.epochs, **loading)
    config, log = work / "run.yaml", work / "run" / "log.jsonl"
    config.write_text(json.dumps(settings(work, arguments)), encoding="utf-8")  # JSON is YAML
    for name, steps in (("start", 1), ("second", 2), ("train", 2 + arguments.steps)):
        found[name] = train(config, log, steps)
        say(f"{pairs}, {name}: first update after {found[name]['first_update']:.1f} s")
    return found


def tables(found: Sequence[dict[str, Any]]) -> str:
    """What was found, a row for each size."""
    encode = [
        [
            size["pairs"], size["text"]["mb"], size["encode"]["seconds"],
            size["encode"]["pairs_per_second"], size["encode"]["bare_pairs_per_second"],
            f"{100 * size['encode']['share']:.0f} %", size["encode"]["processes"],
            size["encode"]["peak_mb"], size["encode"]["store_mb"],
        ]
        for size in found
    ]  # fmt: skip
    load = [
        [
            size["pairs"], size["load"]["open_seconds"], max(size["load"]["plan_seconds"]),
            size["load"]["plan_peak_mb"], size["load"]["batches"],
            size["load"]["pairs_per_second"],
            " ".join(f"{value:.0f}" for value in size["load"]["memory_mb"]),
        ]
        for size in found
    ]  # fmt: skip
    start = []
    for size in found:
        memory = size["train"]["memory"] or [0.0]
        quarter = memory[len(memory) // 4 :]
        start.append(
            [
                size["pairs"], size["start"]["first_update"], size["second"]["first_update"],
                f"{quarter[0]:.0f} {quarter[-1]:.0f}", max(memory),
            ]
        )  # fmt: skip
    parts = [
        table(
            "Encoding",
            ["pairs", "text, MB", "seconds", "pairs/s", "bare encode_batch, pairs/s", "share",
             "processes", "peak MB of all processes", "store, MB"],
            encode,
        ),
        table(
            "Epochs: plan, loader and collation",
            ["pairs", "opening, s", "plan, s (longest)", "peak MB of planning", "batches",
             "pairs/s", "MB before and after each epoch"],
            load,
        ),
        table(
            "mttrain train: seconds from the command to its first update, and memory",
            ["pairs", "first start", "second start", "MB after a quarter and at the end",
             "peak MB"],
            start,
        ),
    ]  # fmt: skip
    if len(found) > 1:
        one, two = found[0], found[-1]
        names = ("encode", "seconds"), ("load", "seconds")
        rows = [[*name, two[name[0]][name[1]] / one[name[0]][name[1]]] for name in names]
        plans = max(two["load"]["plan_seconds"]) / max(one["load"]["plan_seconds"])
        rows.append(["load", "plan_seconds", plans])
        factor = two["pairs"] / one["pairs"]
        parts.append(table(f"Growth for {factor:g} times the pairs", ["task", "", "times"], rows))
    return "\n".join(parts)


# ---- the command line -------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """All options."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--pairs", type=int, nargs="+", default=[1_000_000, 10_000_000], metavar="N")
    add("--shards", type=int, default=8, metavar="N", help="files of each side (default: 8)")
    add("--gz", action="store_true", help="pack the text files")
    add("--vocab", type=int, default=16000, metavar="N", help="entries (default: 16000)")
    add("--bare", type=int, default=1_000_000, metavar="N", help="pairs for the bare speed")
    add("--batch-tokens", type=int, default=4096, metavar="N", help="of a batch (default: 4096)")
    add("--workers", type=int, default=0, metavar="N", help="loader processes (default: 0)")
    add("--epochs", type=int, default=3, metavar="N", help="of the loader (default: 3)")
    add("--steps", type=int, default=1000, metavar="N", help="updates for memory (default: 1000)")
    add("--work", type=Path, metavar="DIR", help="keep what is made here and use it again")
    add("--json", type=Path, metavar="FILE", help="write everything that was found")
    return made


def main(words: Sequence[str] | None = None) -> int:
    """Measure all sizes; 1 when something fails."""
    arguments = parser().parse_args(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends what it measures, too
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as temporary:
        arguments.work = (arguments.work or Path(temporary)).absolute()
        try:
            for pairs in arguments.pairs:
                found.append(measure(pairs, arguments))
        except BenchError as error:
            say(f"error: {error}")
            return 1
        finally:
            if arguments.json:
                arguments.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    print(tables(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
