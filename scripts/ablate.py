"""Train the variants of a configuration on the same sentences, and compare them.

    python scripts/ablate.py --list
    python scripts/ablate.py --jobs 2 --threads 1
    python scripts/ablate.py --only heads norm-post --steps 2000 --json figures.json
    python scripts/ablate.py --table

Run from where the paths of the configuration hold. Every variant makes the same number of updates
with the same number of sentence pairs each, under the configuration's schedule, which ends with
them, and is judged on the validation set; the test set is switched off. The base, the configuration
itself, is trained with several seeds: how far its scores lie apart is what a difference must pass.

Each run is `mttrain train` in a process of its own, in a folder below --runs. A finished run is
kept, one that was cut short goes on: so the same command completes what is missing. The tables go
to stdout, talk to stderr; what a run says goes to NAME.txt beside its folder.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ablate_plan import BASE, CLAIMS, AblationError, Plan, Run, Variant, chosen
from ablate_table import BLEUS, Row, averages, quality, steadiness
from bench_setup import last_line, say, table

from mttrain.errors import MttrainError
from mttrain.rundir import STATE_TENSORS, STATE_VALUES

CONFIG = "configs/multi30k_en_de.yaml"
RUNS = "runs/ablation"
_POLL = 0.2  # seconds between two looks at the running processes


# ---- training ---------------------------------------------------------------------------------


class Stop:
    """Counts the signals that ask this program to stop, while it is entered.

    Only counted, not raised: so no process is lost between its start and the book about it.
    """

    def __init__(self) -> None:
        self.number, self.asked = 0, 0
        self._former: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
                self._former[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)

    def _ask(self, number: int, _: object) -> None:
        self.number, self.asked = number, self.asked + 1


def train_all(plan: Plan, jobs: int, threads: int, stop: Stop) -> list[str]:
    """Train what is not finished, `jobs` at a time; returns the names of the runs that failed."""
    waiting = [r for r in plan.runs if not (plan.figures(r).finished or r.diverged())]
    total, done, told = len(waiting), 0, 0
    running: dict[str, tuple[Run, subprocess.Popen[bytes]]] = {}
    failed = []
    try:
        while running or (waiting and not stop.number):
            while waiting and len(running) < jobs and not stop.number:
                run = waiting.pop(0)
                running[run.name] = run, _start(run, plan.arguments.config, threads)
            if stop.asked > told:
                # The first signal lets a run save its state, a second one ends it at once.
                told = stop.asked
                say(f"stopping {', '.join(running) or 'nothing'}")
                for _, process in running.values():
                    process.terminate()
            time.sleep(_POLL)
            for name, (run, process) in list(running.items()):
                status = process.poll()
                if status is not None:
                    del running[name]
                    done += 1
                    if not _ended(plan, run, status, f"[{done}/{total}]", bool(stop.number)):
                        failed.append(name)
    finally:
        for _, process in running.values():
            process.terminate()
            process.wait()
    return failed


def _start(run: Run, config: Path, threads: int) -> subprocess.Popen[bytes]:
    """The process of a run, which our terminal's Ctrl-C does not reach."""
    sets = [part for text in run.settings for part in ("--set", text)]
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
    run.talk.parent.mkdir(parents=True, exist_ok=True)
    with open(run.talk, "ab") as talk:
        return subprocess.Popen(
            [sys.executable, "-m", "mttrain", "train", "--config", str(config), *sets],
            stdin=subprocess.DEVNULL,
            stdout=talk,
            stderr=talk,
            env={**os.environ, **dict.fromkeys(names, str(threads))},
            start_new_session=True,
        )


def _ended(plan: Plan, run: Run, status: int, count: str, stopped: bool) -> bool:
    """Tell how a run has ended; False when it failed. A run that diverged is a result."""
    figures = plan.figures(run)
    if figures.finished:
        for path in run.folder.glob("checkpoints/*/*"):
            if path.name in (STATE_TENSORS, STATE_VALUES):
                path.unlink()  # twice the size of the weights, and nothing goes on from here
        say(f"{count} {run.name}: BLEU {figures.bleu:.2f}, {figures.seconds:,.0f} s in updates")
        return True
    said = last_line(run.talk.read_text("utf-8", "replace"))
    expected = stopped or run.diverged()
    how = "" if expected else f" failed ({status})"
    say(f"{count} {run.name}{how}: {said or 'said nothing'}")
    return expected


# ---- results ----------------------------------------------------------------------------------


def tables(plan: Plan) -> Iterator[str]:
    """The Markdown tables, and what they need said."""
    named = {run.name: plan.figures(run) for run in plan.base}
    finished = sum(figures.finished for figures in named.values())
    status = "" if finished == len(named) else f"{finished} of {len(named)} seeds finished"
    base = Row(BASE, status, [figures for figures in named.values() if figures.finished])
    others = []
    for run in plan.others:
        figures = plan.figures(run)
        others.append(Row(run.name, run.status(figures), [figures]))
    pairs = {f.pairs for row in (base, *others) for f in row.runs if f.pairs is not None}
    if len(pairs) > 1:
        say(f"warning: not all runs see the same sentences: {min(pairs):,} to {max(pairs):,} pairs")
    yield quality(base, others)
    yield (
        f"\nBase: mean ± standard deviation (SD) of one run, from {finished} seeds. BLEU and chrF "
        "without more: of the best candidate for the result. Likelihood: of the reference, its end "
        "included."
    )
    if plan.same:
        yield f"The base is also {', '.join(plan.same)}."
    yield steadiness(base, others)
    yield averages(named)


def record(plan: Plan) -> dict[str, Any]:
    """Everything that the tables come from, for --json."""
    runs = {}
    for run in plan.runs:
        figures = plan.figures(run)
        runs[run.name] = {
            "group": run.group,
            "status": run.status(figures) or "finished",
            "settings": run.settings[len(plan.common) :],
            **asdict(figures),
            "bleu": figures.bleu,
            "chrf": figures.chrf,
            "updates_to": {f"{bleu:g}": figures.reached(bleu) for bleu in BLEUS},
        }
    arguments = plan.arguments
    return {
        "config": str(arguments.config),
        "common": plan.common,
        "loss_changes_after": plan.settled,
        "reference_characters": plan.characters,
        "base_is_also": plan.same,
        "refused": plan.refused,
        "runs": runs,
    }


# ---- the command line -------------------------------------------------------------------------


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def parser() -> argparse.ArgumentParser:
    """All options."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    count: dict[str, Any] = {"type": _positive, "metavar": "N"}
    add("--config", type=Path, default=Path(CONFIG), metavar="F", help=f"default: {CONFIG}")
    add("--runs", type=Path, default=Path(RUNS), metavar="DIR", help=f"default: {RUNS}")
    add("--steps", default=1000, help="updates of each run (default: 1000)", **count)
    add("--batch-size", default=100, help="sentence pairs an update (default: 100)", **count)
    add("--only", nargs="+", default=[], metavar="NAME", help="variants or groups, beside the base")
    add("--seeds", default=3, help="of the base (default: 3)", **count)
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="for all runs; repeatable")
    add("--jobs", help="runs at a time (default: 1)", **count)
    add("--threads", help="of each run (default: the cores, shared by the jobs)", **count)
    add("--json", type=Path, metavar="FILE", help="write all figures there")
    instead = made.add_mutually_exclusive_group()
    instead.add_argument("--list", action="store_true", help="show the variants, train nothing")
    instead.add_argument("--table", action="store_true", help="show what there is, train nothing")
    return made


def main(words: Sequence[str] | None = None) -> int:
    """Plan, train, show; 1 when a run failed, 2 for wrong options, 128 + signal when stopped."""
    made = parser()
    arguments = made.parse_args(words)
    if (arguments.list or arguments.table) and (arguments.jobs or arguments.threads):
        made.error("--jobs and --threads have no effect with --list and --table")
    if arguments.list and arguments.json:
        made.error("--json has no effect with --list")
    try:
        if arguments.list:
            print(listing(chosen(arguments.only)))
            return 0
        return _work(arguments)
    except AblationError as error:
        say(f"error: {error}")
        return 2
    except MttrainError as error:
        say(f"error: {error}")
        return error.exit_code


def listing(variants: Sequence[Variant]) -> str:
    """The variants with what each changes, and what each group asks."""
    claims = [[group, CLAIMS[group]] for group in dict.fromkeys(v.group for v in variants)]
    rows = [[v.name, v.group, " ".join(v.settings)] for v in variants]
    text = table("Variants", ["name", "group", "settings"], rows)
    return text + "\n" + table("Claims", ["group", "asks whether"], claims)


def _work(arguments: argparse.Namespace) -> int:
    plan = Plan(arguments)
    for name, why in plan.refused.items():
        say(f"{name} is left out; the configuration does not allow it: {why}")
    failed: list[str] = []
    if not arguments.table:
        jobs = arguments.jobs or 1
        threads = arguments.threads or max(1, (os.cpu_count() or 1) // jobs)
        with Stop() as stop:
            failed = train_all(plan, jobs, threads, stop)
        if stop.number:
            say("stopped; the same command goes on from there")
            return 128 + stop.number
    for text in tables(plan):
        print(text, flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(record(plan), indent=1) + "\n", "utf-8")
    if failed:
        say(f"error: {len(failed)} runs failed: {', '.join(failed)}; see their .txt files")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
