"""A measured program: what it is asked for, and mttrain's own command line as one of them.

Peers are in `bench_peers`. A method that a program lacks raises BenchError, in one line.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import ClassVar

from bench_setup import TOKENS, BenchError, Finished, Measured, Setup, follow, last_of, ours, run


def number(text: str) -> float:
    """1,234.5 -> 1234.5"""
    return float(text.replace(",", ""))


class Program:
    """One program that is measured: `train()` and `decode(beam)` do what they can."""

    name: ClassVar[str]
    package: ClassVar[str] = ""  # its distribution's name
    report: ClassVar[str] = ""  # finds the number in a line of its log that reports an update
    variants: ClassVar[tuple[str, ...]] = ("",)  # of decoding, such as arithmetics

    def __init__(self, setup: Setup, env: Path) -> None:
        self.setup, self.env = setup, env
        self.folder = setup.folder(self.name)

    def program(self, name: str) -> Path:
        """A program of the environment."""
        path = self.env / "bin" / name
        if not path.exists():
            raise BenchError(f"{self.name}: there is no {path}")
        return path

    def version(self) -> str:
        """The installed version, and torch's where there is one."""
        code = (
            "import importlib.metadata as m, sys\n"
            "for n in sys.argv[1:]:\n"
            "    try: print(n, m.version(n))\n"
            "    except m.PackageNotFoundError: pass\n"
        )
        command = [self.program("python"), "-c", code, self.package, "torch"]
        return ", ".join(run(command, self.setup.environment()).output.strip().splitlines())

    def help_command(self) -> list[str | Path]:
        """What prints the help of its trainer."""
        raise BenchError(f"{self.name} has no command line")

    def train(self) -> Measured:
        """Steady training speed in target tokens per second, and peak memory."""
        raise BenchError(f"{self.name} does not train")

    def decode(self, beam: int, variant: str) -> Measured:
        """Sentences per second at the fixed length; `tokens`: of the output, for checking."""
        raise BenchError(f"{self.name} does not decode")

    def tokens_of(self, line: str, age: float) -> float | None:
        """Target tokens of the update that a line of its log reports; None for other lines.

        age: seconds since the report before.
        """
        found = re.search(self.report, line)
        return number(found[1]) if found else None

    def follow(
        self, command: list[str | Path], log: Path | None = None, **environment: str
    ) -> Measured:
        """The training speed of a command, from its log."""
        return follow(
            command,
            self.setup.environment(**environment),
            self.tokens_of,
            warmup=self.setup.warmup,
            seconds=self.setup.seconds,
            log=log,
        )

    def made(self, path: Path, command: list[str | Path], **environment: str) -> Path:
        """The path, after the command has made it; nothing is done when it is there."""
        if not path.exists():
            run(command, self.setup.environment(**environment))
        if not path.exists():
            raise BenchError(f"{self.name} did not write {path}")
        return path

    def per_second(self, pattern: str, output: str) -> float:
        """Sentences per second from the seconds that a program says its search took."""
        found = re.findall(pattern, output)
        if not found:
            raise BenchError(f"{self.name} did not say how long it took")
        return self.sentences / sum(map(number, found))

    def answered(self, finished: Finished) -> Measured:
        """What a script of ours in the program's environment printed: one JSON line."""
        answer = json.loads(last_of(finished.output))
        return Measured(answer.pop("rate"), finished.peak_mb, answer)

    @property
    def sentences(self) -> int:
        """Lines of the test text."""
        return len(self.lines("test.tok.src"))

    def lines(self, name: str) -> list[str]:
        """The lines of a file of the common text."""
        return Path(self.setup.text(name)).read_text(encoding="utf-8").split("\n")[:-1]

    def output_length(self, outputs: list[str]) -> float:
        """Mean tokens of the outputs, with the end symbol of those that are below the limit."""
        lengths = [min(len(line.split()) + 1, TOKENS) for line in outputs]
        return round(sum(lengths) / max(len(lengths), 1), 2)


class Mttrain(Program):
    """Ours, as a user runs it: `mttrain train`, and the translator in a fresh process."""

    name, package = "mttrain", "mttrain"
    variants = ("", "int8")

    def help_command(self) -> list[str | Path]:
        script = Path(sys.executable).with_name("mttrain")
        return (
            [script, "--help"] if script.exists() else [sys.executable, "-m", "mttrain", "--help"]
        )

    def tokens_of(self, line: str, age: float) -> float | None:
        record = json.loads(line)
        return float(record["target_tokens"]) if record["kind"] == "train" else None

    def train(self) -> Measured:
        """The records of log.jsonl, one for each update."""
        run_dir, config = self.folder / "run", self.folder / "bench.yaml"
        shutil.rmtree(run_dir, ignore_errors=True)
        settings = self.setup.run_settings(str(run_dir), max_time=1800)
        config.write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML
        command = [sys.executable, "-m", "mttrain", "train", "--config", config]
        return self.follow(command, run_dir / "log.jsonl")

    def decode(self, beam: int, variant: str) -> Measured:
        answer, finished = ours("forced", self.setup, beam=beam, precision=variant or "fp32")
        return Measured(answer.pop("rate"), finished.peak_mb, answer)
