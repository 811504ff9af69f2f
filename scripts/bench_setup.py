"""What the measuring programs share: sizes, settings, child processes, and windows of time.

A measured program always runs in a process of its own, so that its peak memory (the resident set
that the kernel reports for a finished child) is its own. This module imports neither torch nor
mttrain: on Linux a child's peak begins with what its parent holds when it is started.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
IN_TEXT = ("common_text", "tokenizer")  # tasks that need no torch
TOKENS = 16  # tokens of every output in forced decoding, the end symbol included
BATCH_SENTENCES = 64
SMOOTHING, CLIP, RATE, WARMUP_STEPS = 0.1, 1.0, 5e-3, 1000
MIN_UPDATES = 2  # of a window
_POLL = 0.02  # seconds between two looks at a growing file


class BenchError(Exception):
    """A measurement that cannot be made, in one line; the others go on."""


@dataclass(frozen=True)
class Size:
    """A Transformer: `layers` in the encoder and as many in the decoder."""

    layers: int
    d_model: int
    d_ff: int
    heads: int
    dropout: float


SIZES = {
    "tiny": Size(4, 128, 256, 4, 0.3),
    "base": Size(6, 512, 2048, 8, 0.1),
    "mini": Size(1, 32, 64, 2, 0.1),  # to try the commands out
}


@dataclass(frozen=True)
class Setup:
    """What every measured program is told."""

    work: str  # directory of everything that is written
    size: str = "tiny"
    vocab: int = 6000  # types, the special ones included
    batch_tokens: int = 4096  # padded tokens of each side of a batch
    threads: int = 2
    device: str = "cpu"
    seconds: float = 30.0  # of a measured window
    warmup: float = 10.0  # seconds of updates before the window
    sentences: int = 1000  # of the test text
    languages: tuple[str, str] = ("en", "de")

    @property
    def model(self) -> Size:
        return SIZES[self.size]

    def text(self, name: str) -> str:
        """A file of the common text, such as train.src or train.tok.tgt."""
        return str(Path(self.work) / "text" / name)

    def folder(self, name: str) -> Path:
        """A directory for what one program writes."""
        path = Path(self.work) / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def environment(self, **more: str) -> dict[str, str]:
        """The environment of a measured program: as many threads as were asked for."""
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
        return {
            **os.environ,
            **dict.fromkeys(names, str(self.threads)),
            "PYTHONUNBUFFERED": "1",
            "PYTHONWARNINGS": "ignore",
            "TOKENIZERS_PARALLELISM": "true",
            **more,
        }

    def run_settings(self, run_dir: str, **train: Any) -> dict[str, Any]:
        """A run configuration as a tree, with the common settings of all programs."""
        size, (source, target) = self.model, self.languages
        return {
            "run_dir": run_dir,
            "threads": self.threads,
            "data": {
                "source_lang": source,
                "target_lang": target,
                "train": {"source": self.text("train.src"), "target": self.text("train.tgt")},
                "valid": {"source": self.text("valid.src"), "target": self.text("valid.tgt")},
                "cache_dir": str(self.folder("ours/cache")),
            },
            "tokenizer": {"path": self.text("tokenizer.json")},
            "model": {
                "d_model": size.d_model,
                "d_ff": size.d_ff,
                "num_heads": size.heads,
                "encoder_layers": size.layers,
                "decoder_layers": size.layers,
                "dropout": size.dropout,
            },
            "optim": {
                "lr": RATE,
                "warmup_steps": WARMUP_STEPS,
                "label_smoothing": SMOOTHING,
                "clip_norm": CLIP,
            },
            "train": {
                "batch_tokens": self.batch_tokens,
                "device": self.device,
                "valid_every": 10**9,
                "log_every": 1,
                "average": 0,
                **train,
            },
        }

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Setup:
        values = json.loads(text)
        return cls(**{**values, "languages": tuple(values["languages"])})


@dataclass
class Measured:
    """One measurement: a rate (tokens or sentences per second), peak memory, and details."""

    rate: float
    peak_mb: float
    details: dict[str, Any] = field(default_factory=dict)


# ---- child processes --------------------------------------------------------------------------


@dataclass(frozen=True)
class Finished:
    """A process that has ended. `output`: stdout and stderr together, or stdout alone."""

    output: str
    seconds: float  # from start to end
    peak_mb: float


def say(text: str) -> None:
    """Talk: on stderr, so that stdout holds results only."""
    print(text, file=sys.stderr, flush=True)


def run(
    command: Sequence[str | Path],
    environment: dict[str, str],
    *,
    stdin: str | None = None,
    separate: bool = False,
    limit: float = 1800.0,
) -> Finished:
    """Run a program to its end; BenchError with its last line when it fails or takes too long.

    separate: keep stderr out of the output (it is then shown only in the error).
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        start = time.perf_counter()
        process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
            stdout=output,
            stderr=errors if separate else output,
            env=environment,
            start_new_session=True,
        )
        timer = threading.Timer(limit, _end, [process])
        timer.start()
        try:
            if stdin is not None and process.stdin is not None:
                process.stdin.write(stdin.encode())
                process.stdin.close()
            peak = _reap(process)
        finally:
            timer.cancel()
            _end(process)
        seconds = time.perf_counter() - start
        output.seek(0)
        errors.seek(0)
        text, trouble = (
            output.read().decode(errors="replace"),
            errors.read().decode(errors="replace"),
        )
    if process.returncode != 0:
        why = "took too long" if seconds >= limit else f"failed ({process.returncode})"
        raise BenchError(f"{Path(str(command[0])).name} {why}: {last_line(trouble or text)}")
    return Finished(text, seconds, peak)


def follow(
    command: Sequence[str | Path],
    environment: dict[str, str],
    tokens_of: Callable[[str, float], float | None],
    *,
    warmup: float,
    seconds: float,
    log: Path | None = None,
    limit: float = 1800.0,
) -> Measured:
    """Tokens per second of a training program, read from its own log; then it is ended.

    log: the file where its lines are; None: what it prints. `tokens_of(line, age)` gives the target
    tokens that a line reports, None for other lines; age is the time since the report before. The
    window begins with the first report that comes `warmup` seconds after the very first one and is
    `seconds` long or longer.
    """
    reports: list[tuple[float, float]] = []
    with tempfile.TemporaryFile("w+", errors="replace") as printed:
        process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=printed if log else subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            start_new_session=True,
        )
        timer = threading.Timer(limit, _end, [process])
        timer.start()
        try:
            for line in _appended(log, process) if log else process.stdout or ():
                now = time.perf_counter()
                if not log:
                    printed.write(line)
                tokens = tokens_of(line, now - reports[-1][0] if reports else 0.0)
                if tokens is not None:
                    reports.append((now, tokens))
                    if window_tokens(reports, warmup, seconds) is not None:
                        break
        finally:
            timer.cancel()
            _end(process)
            peak = _reap(process)
            if process.stdout is not None:
                process.stdout.close()
        found = window_tokens(reports, warmup, seconds)
        if found is None:
            printed.seek(0)
            detail = last_line(printed.read()) or "no output"
            name = Path(str(command[0])).name
            raise BenchError(f"{name} ended after {len(reports)} reports: {detail}")
    rate, updates, length = found
    return Measured(rate, peak, {"updates": updates, "seconds": round(length, 2)})


def _appended(path: Path, process: subprocess.Popen[Any]) -> Iterator[str]:
    """The whole lines of a file as they are written, until the process ends."""
    ended, rest = False, ""
    while not path.exists() and not ended:
        ended = _has_ended(process)
        time.sleep(_POLL)
    if not path.exists():
        return
    with open(path, encoding="utf-8") as file:
        while True:
            rest += file.readline()
            if rest.endswith("\n"):
                yield rest
                rest = ""
            elif ended:
                return
            else:
                ended = _has_ended(process)  # and then one more look at the file
                time.sleep(_POLL)


def _has_ended(process: subprocess.Popen[Any]) -> bool:
    """Whether a process has ended; it stays for `_reap`."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def window_tokens(
    reports: Sequence[tuple[float, float]], warmup: float, seconds: float
) -> tuple[float, int, float] | None:
    """Rate, reports and length of the window in (time, tokens since the last report) pairs.

    The tokens of the report that opens the window belong to the time before it. None: not reached.
    """
    begin = next((i for i, (at, _) in enumerate(reports) if at - reports[0][0] >= warmup), None)
    if begin is None:
        return None
    length = reports[-1][0] - reports[begin][0]
    count = len(reports) - 1 - begin
    if length < seconds or count < MIN_UPDATES:
        return None
    return sum(tokens for _, tokens in reports[begin + 1 :]) / length, count, length


def _reap(process: subprocess.Popen[Any]) -> float:
    """Wait for the end of a process; its peak resident memory in MB."""
    if process.returncode is not None:
        return 0.0
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    unit = 1 << 20 if sys.platform == "darwin" else 1 << 10
    return usage.ru_maxrss / unit


def _end(process: subprocess.Popen[Any]) -> None:
    """End a process and its children; it is reaped by `_reap`."""
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def last_line(text: str) -> str:
    """The last line with text in it, for an error of one line."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")[:300]


def ours(task: str, setup: Setup, **arguments: Any) -> tuple[dict[str, Any], Finished]:
    """Run a task of ours in a fresh process: bench_text.py has two, bench_ours.py the others."""
    script = HERE / ("bench_text.py" if task in IN_TEXT else "bench_ours.py")
    command = [sys.executable, script, task, setup.to_json(), json.dumps(arguments)]
    finished = run(command, setup.environment(), separate=True)
    found: dict[str, Any] = json.loads(last_of(finished.output))
    return found, finished


def answer(tasks: Sequence[Callable[..., dict[str, Any]]]) -> int:
    """The other end of `ours`: run the task of the command line (TASK SETUP ARGUMENTS, JSON).

    Prints one JSON line; of a failure, the last line on stderr is shown by `run`.
    """
    task = {task.__name__: task for task in tasks}[sys.argv[1]]
    try:
        found = task(Setup.from_json(sys.argv[2]), **json.loads(sys.argv[3]))
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(found))
    return 0


def last_of(output: str) -> str:
    return output.strip().splitlines()[-1]


# ---- figures ----------------------------------------------------------------------------------


def median(values: Iterable[float]) -> float:
    return statistics.median(list(values))


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table with columns of equal width; numbers get 3 or more digits."""
    cells = [list(map(str, head)), *[[figure(cell) for cell in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) + " |" for r in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join([f"\n{title}\n", *lines])


def figure(value: Any) -> str:
    """A number as people read it: 12,345, 123, 12.3, 1.234."""
    if value is None:
        return "-"
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.3f}"
