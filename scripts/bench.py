"""Measure mttrain: training, decoding, vocabulary, starting up, growth; beside other programs.

    python scripts/bench.py train --against fairseq --peers ~/peers --rounds 3
    python scripts/bench.py decode --model runs/multi30k_en_de
    python scripts/bench.py all --json figures.json

Every measurement is a process of its own; nothing else may compute meanwhile. Programs that are
compared take turns (A B A B ...), each round gives a ratio, and the median of the ratios counts:
absolute figures drift with the machine. A ratio above 1 says that mttrain is faster. Tables go to
stdout, talk to stderr. docs/benchmarks.md tells how everything is measured and how the other
programs are installed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench_peers import PEERS
from bench_program import Mttrain, Program
from bench_setup import SIZES, TOKENS, BenchError, Measured, Setup, median, ours, run, say, table

PROJECT = Path(__file__).resolve().parents[1]
BEAMS = (5, 1)
GROWTH = {
    "batch": (1024, 2048, 4096, 8192, 16384),
    "vocabulary": (2000, 4000, 8000, 16000, 32000),
    "length": (10, 20, 50, 100, 200, 500),
    "beam": (1, 2, 4, 8, 16),
}
# Batch sizes of natural decoding, 0 = the default batches; plain: no prepared weights, no cache.
PATHS = {"plain": (64,), "fp32": (1, 8, 32, 64, 128, 0), "int8": (1, 8, 32, 64, 128, 0)}
SENTENCE = "Two young men stand on the stairs of a house and talk.\n"


class Bench:
    """One call of the command: its settings, its programs, and the record of what was found."""

    def __init__(self, setup: Setup, arguments: argparse.Namespace, peers: dict[str, Path]) -> None:
        self.setup, self.arguments = setup, arguments
        self.rounds: int = arguments.rounds
        self.programs: list[Program] = [Mttrain(setup, Path(sys.prefix))]
        self.programs += [PEERS[name](setup, env) for name, env in peers.items()]
        self.record: dict[str, Any] = {
            "command": sys.argv[1:],
            "machine": machine(),
            "setup": asdict(setup),
            "rounds": self.rounds,
        }

    def begin(self) -> None:
        """Look at what is there: versions, and the common text."""
        versions = self.record["versions"] = {}
        for program in list(self.programs):
            with self.spared(program.name):
                versions[program.name] = program.version()
                continue
            self.programs.remove(program)
        if not self.programs or self.programs[0].name != Mttrain.name:
            raise BenchError("mttrain itself cannot be run")
        corpus = str(self.arguments.corpus)
        self.record["text"], _ = ours("common_text", self.setup, corpus=corpus)
        counts = self.record["text"]["parts"]
        say(f"text: {counts['train']['pairs']} training and {counts['test']['pairs']} test pairs")

    @contextmanager
    def spared(self, what: str) -> Iterator[None]:
        """A measurement whose failure is told in one line, and which does not stop the others."""
        try:
            yield
        except BenchError as error:
            say(f"{what}: not measured: {error}")
            self.record.setdefault("failures", []).append(f"{what}: {error}")

    def in_turn(
        self, what: str, calls: dict[str, Callable[[], Measured]], unit: str
    ) -> dict[str, list[Measured]]:
        """Each call once per round, in turn; one that fails is left out from then on."""
        found: dict[str, list[Measured]] = {}
        left = dict(calls)
        for number in range(1, self.rounds + 1):
            for name, call in list(left.items()):
                with self.spared(f"{what}, {name}"):
                    measured = call()
                    found.setdefault(name, []).append(measured)
                    say(f"{what}, round {number}, {name}: {measured.rate:,.1f} {unit}")
                    continue
                del left[name]
        self.record[what] = {name: [asdict(m) for m in all_] for name, all_ in found.items()}
        return found

    # ---- commands ------------------------------------------------------------------------------

    def train(self) -> None:
        """Training speed and memory of all programs, and our distance from the bound."""
        if not self.arguments.no_bound:
            with self.spared("bound"):
                self.bound()
        able = [program for program in self.programs if type(program).train is not Program.train]
        calls = {program.name: program.train for program in able}
        found = self.in_turn("train", calls, "target tokens/s")
        setup = self.setup
        title = (
            f"Training, {setup.size} model, {setup.batch_tokens} tokens a batch, {setup.threads} "
            f"threads, {setup.device}: target tokens per second without padding"
        )
        print(comparison(title, found, "tokens/s"), flush=True)

    def bound(self) -> None:
        """Ours against its own matrix products alone."""
        answer, _ = ours("bound", self.setup)
        self.record["bound"] = answer
        if answer["unknown"]:
            say(f"bound: operations that were not counted: {', '.join(answer['unknown'])}")
        row = [
            answer["rate"],
            answer["bound_rate"],
            answer["ratio"],
            answer["updates"],
            *(f"{100 * share:.1f} %" for share in (*answer["padding"], answer["waiting"])),
        ]
        head = ["real steps", "products alone", "time ratio", "updates"]
        head += ["padding, source", "padding, target", "waiting for data"]
        title = f"Training steps against their matrix products, {self.setup.size} model, tokens/s"
        print(table(title, head, [row]), flush=True)

    def decode(self) -> None:
        """Decoding at a fixed output length, and of a trained run when one is given."""
        for beam in BEAMS:
            calls: dict[str, Callable[[], Measured]] = {}
            for program in self.programs:
                for variant in program.variants:
                    name = f"{program.name} {variant}".strip()
                    calls[name] = lambda p=program, v=variant, b=beam: p.decode(b, v)
            found = self.in_turn(f"decode, beam {beam}", calls, "sentences/s")
            title = (
                f"Decoding, {self.setup.size} model, beam {beam}, {TOKENS} tokens each, batches of "
                f"64, {self.setup.threads} threads, {self.setup.device}: sentences per second"
            )
            print(comparison(title, found, "sentences/s"), flush=True)
        if self.arguments.model:
            self.natural()

    def natural(self) -> None:
        """A trained run on the test text: speed over batch sizes, and BLEU."""
        rows = []
        for precision, sizes in PATHS.items():
            with self.spared(f"natural decoding, {precision}"):
                answer, finished = ours(
                    "natural",
                    self.setup,
                    model=str(self.arguments.model),
                    precision=precision,
                    beams=BEAMS,
                    sizes=sizes,
                )
                self.record.setdefault("natural", {})[precision] = answer
                signature = answer["signature"]
                rows += [
                    [
                        precision, row["beam"], row["batch"] or "default", row["rate"],
                        row["tokens_rate"], f"{row['bleu']:.2f}", finished.peak_mb,
                    ]
                    for row in answer["rows"]
                ]  # fmt: skip
        if not rows:
            return
        head = ["path", "beam", "batch", "sentences/s", "tokens/s", "BLEU", "peak MB of all"]
        title = f"Decoding {self.arguments.model}, natural lengths; BLEU: {signature}"
        print(table(title, head, rows), flush=True)

    def tokenizer(self) -> None:
        """The vocabulary: learning, encoding, decoding."""
        answers = [ours("tokenizer", self.setup)[0] for _ in range(self.rounds)]
        self.record["tokenizer"] = answers
        names = {
            "learn_seconds": f"learning {self.setup.vocab} types, s",
            "encode_mb_per_second": "encoding, MB/s",
            "decode_mb_per_second": "decoding, MB/s",
        }
        rows = [[text, median(a[key] for a in answers)] for key, text in names.items()]
        title = f"Vocabulary, {answers[0]['megabytes']:.1f} MB of text, {self.rounds} rounds"
        print(table(title, ["what", "median"], rows), flush=True)

    def startup(self) -> None:
        """Whole-process seconds, as ratios to importing torch."""
        ours_, *peers = self.programs
        commands: dict[str, list[str | Path]] = {
            "import torch": [sys.executable, "-c", "import torch"],
            "mttrain --help": ours_.help_command(),
        }
        if self.arguments.model:
            model = str(self.arguments.model)
            device = ["--device", self.setup.device]
            translate = [sys.executable, "-m", "mttrain", "translate", "--model", model, *device]
            commands["mttrain translate, one sentence"] = translate
        for peer in peers:
            with self.spared(f"startup, {peer.name}"):
                commands[f"{peer.name}, help"] = peer.help_command()

        def seconds(name: str) -> Measured:
            stdin = SENTENCE if "translate" in name else None
            done = run(commands[name], self.setup.environment(), stdin=stdin)
            return Measured(done.seconds, done.peak_mb)

        calls = {name: lambda name=name: seconds(name) for name in commands}
        found = self.in_turn("startup", calls, "s")
        torch = found["import torch"]
        rows = [
            [
                name,
                median(m.rate for m in all_),
                median(m.rate / t.rate for m, t in zip(all_, torch, strict=False)),
                median(m.peak_mb for m in all_),
            ]
            for name, all_ in found.items()
        ]
        head = ["process", "seconds", "of importing torch", "peak MB"]
        print(table(f"Starting up, medians of {self.rounds} rounds", head, rows), flush=True)

    def growth(self) -> None:
        """Our speed and memory over the size of one thing at a time."""
        for axis in self.arguments.axis:
            rows = []
            for value in GROWTH[axis]:
                with self.spared(f"growth, {axis} {value}"):
                    answer, finished = self.grown(axis, value)
                    say(f"growth, {axis} {value}: {answer['rate']:,.1f}")
                    memory = answer["device_mb"] or finished.peak_mb
                    rows.append([value, answer["rate"], memory])
            self.record.setdefault("growth", {})[axis] = rows
            what, unit = {
                "batch": ("Training over the tokens of a batch", "target tokens/s"),
                "vocabulary": ("Training over the vocabulary, 16 tokens a side", "target tokens/s"),
                "length": ("Training over the tokens of a sentence", "target tokens/s"),
                "beam": (f"Decoding over the beam, {TOKENS} tokens each", "sentences/s"),
            }[axis]
            print(
                table(f"{what}, {self.setup.size} model", [axis, unit, "peak MB"], rows), flush=True
            )

    def grown(self, axis: str, value: int) -> Any:
        """One point of one axis."""
        if axis == "beam":
            return ours("forced", self.setup, beam=value, precision="auto")
        if axis == "batch":
            return ours("train", replace(self.setup, batch_tokens=value))
        if axis == "vocabulary":
            return ours("train", replace(self.setup, vocab=value), length=16)
        return ours("train", self.setup, length=value)

    def all(self) -> None:
        """Everything, one after the other."""
        for command in COMMANDS[:-1]:
            getattr(self, command)()


COMMANDS = ("train", "decode", "tokenizer", "startup", "growth", "all")


def comparison(title: str, found: dict[str, list[Measured]], unit: str) -> str:
    """A row for each program: how many times faster ours is, in the same arithmetic if it can."""
    names = list(found)
    if not names:
        return f"\n{title}\n\nnothing could be measured"
    first = found[names[0]]
    rows = []
    for name, all_ in found.items():
        ours_ = found.get(f"{names[0]} int8", first) if name.endswith("int8") else first
        ratios = [a.rate / b.rate for a, b in zip(ours_, all_, strict=False)]
        rows.append(
            [
                name,
                median(m.rate for m in all_),
                " ".join(f"{ratio:.2f}" for ratio in ratios),
                f"{median(ratios):.2f}",
                median(m.peak_mb for m in all_),
            ]
        )
    head = ["program", unit, f"{names[0]} / it, by round", "median", "peak MB"]
    return table(title, head, rows)


def machine() -> dict[str, Any]:
    """The processor, the system, and what else was running."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    load = os.getloadavg()[0]
    if load > 0.7:
        say(f"warning: the load average is {load:.2f}; figures are right only on an idle machine")
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "load_before": round(load, 2),
    }


# ---- the command line -------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """All options; the same for every command."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("command", choices=COMMANDS)
    add = made.add_argument
    add("--corpus", type=Path, metavar="DIR", help="train, valid and test text: train.en, train.de")
    add("--languages", nargs=2, default=["en", "de"], metavar=("SOURCE", "TARGET"))
    add("--size", choices=SIZES, default="tiny", help="of the model (default: tiny)")
    add("--vocab", type=int, default=6000, metavar="N", help="types (default: 6000)")
    add("--batch-tokens", type=int, default=4096, metavar="N", help="of a batch (default: 4096)")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--threads", type=int, default=2, metavar="N", help="of each program (default: 2)")
    add("--rounds", type=int, default=3, metavar="N", help="turns of each program (default: 3)")
    add("--seconds", type=float, default=30.0, metavar="S", help="of a window (default: 30)")
    add("--warmup", type=float, default=10.0, metavar="S", help="before it (default: 10)")
    add("--sentences", type=int, default=1000, metavar="N", help="decoded (default: 1000)")
    add("--against", action="append", choices=PEERS, default=[], help="a program; repeatable")
    add("--peers", type=Path, metavar="DIR", help="folder with a virtual environment for each")
    add("--peer-env", action="append", default=[], metavar="NAME=VENV", help="or one of them")
    add("--model", type=Path, metavar="RUN", help="a trained run, for natural lengths and startup")
    add("--no-bound", action="store_true", help="train: without the matrix products")
    add("--axis", nargs="+", choices=GROWTH, default=list(GROWTH), help="growth: which (all)")
    add("--work", type=Path, metavar="DIR", help="keep what is made here and use it again")
    add("--json", type=Path, metavar="FILE", help="write everything that was found")
    return made


def peer_environments(arguments: argparse.Namespace) -> dict[str, Path]:
    """The virtual environment of each program to compare with; BenchError for one without."""
    known = dict(text.split("=", 1) for text in arguments.peer_env if "=" in text)
    environments = {name: Path(path) for name, path in known.items()}
    if arguments.peers:
        for name in PEERS:
            if (arguments.peers / name).is_dir():
                environments.setdefault(name, arguments.peers / name)
    if set(environments) - set(PEERS) or len(known) < len(arguments.peer_env):
        raise BenchError(f"--peer-env wants NAME=VENV, with NAME one of {', '.join(PEERS)}")
    missing = [name for name in arguments.against if name not in environments]
    if missing:
        raise BenchError(f"no environment for {', '.join(missing)}; use --peers or --peer-env")
    chosen = arguments.against or list(environments)
    # Links stay links: the Python of an environment is one, and must be called by its own name.
    return {name: environments[name].absolute() for name in PEERS if name in chosen}


def default_corpus(languages: Sequence[str]) -> Path:
    """Multi30k if it is there, else the demo corpus."""
    folder = PROJECT / "data" / "multi30k"
    there = all((folder / f"train.{language}").exists() for language in languages)
    return folder if there else PROJECT / "data" / "demo"


def main(words: Sequence[str] | None = None) -> int:
    """Run one command; 1 when mttrain itself cannot be measured, 2 for wrong options."""
    arguments = parser().parse_args(words)
    # Ended from outside, it ends what it measures: a training process would go on for ever.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    arguments.corpus = arguments.corpus or default_corpus(arguments.languages)
    with tempfile.TemporaryDirectory(prefix="bench-") as temporary:
        setup = Setup(
            work=str((arguments.work or Path(temporary)).absolute()),
            size=arguments.size,
            vocab=arguments.vocab,
            batch_tokens=arguments.batch_tokens,
            threads=arguments.threads,
            device=arguments.device,
            seconds=arguments.seconds,
            warmup=arguments.warmup,
            sentences=arguments.sentences,
            languages=tuple(arguments.languages),
        )
        try:
            bench = Bench(setup, arguments, peer_environments(arguments))
        except BenchError as error:
            say(f"error: {error}")
            return 2
        try:
            bench.begin()
            getattr(bench, arguments.command)()
        except BenchError as error:
            say(f"error: {error}")
            return 1
        finally:
            if arguments.json:
                arguments.json.write_text(json.dumps(bench.record, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
