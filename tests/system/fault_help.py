"""Command lines in child processes that can be hurt: failing file operations, deaths, signals.

A server process imports everything once and forks a child for each command, so that a case costs a
fraction of a second. The server never computes, so no thread is lost in a fork. A child is what a
user starts otherwise: a session of its own, `mttrain.cli.main`, and what runs at exit.

Faults strike at operations that change files below one folder: open for writing, write, flush,
close, fsync, truncate, chmod, mkdir, rename, replace, unlink, rmdir, and the tensor library's save.
"""

from __future__ import annotations

import atexit
import builtins
import errno
import gc
import importlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
DEATH = 77  # exit status of a child that a fault ended
CHANGING = ("rename", "replace", "unlink", "remove", "rmdir", "mkdir", "truncate", "chmod")
TAKES_SPACE = frozenset({"open", "write", "flush", "close", "fsync", "mkdir", "save_file"})


@dataclass(frozen=True)
class Fault:
    """What happens to a child, and when.

    root: only operations on files below it count; kind: "error" raises OSError(number), "death"
    ends the process at once, "signal" sends the signal `number` `times` times; at: at which
    operation, from 1 (0: see chance); chance: of each operation, drawn with `seed`; update: count
    from the validation after this update on (None: from the start; a signal with at 0 comes when it
    begins); names: count only these operations; half: let a write that is struck write half of its
    bytes first; sticky: all later operations that take space fail too, as on a full disk.
    """

    root: str
    kind: str = "error"
    number: int = errno.ENOSPC
    at: int = 0
    times: int = 1
    chance: float = 0.0
    seed: int = 0
    update: int | None = None
    names: Sequence[str] = ()
    half: bool = False
    sticky: bool = False


# ---- in the child -----------------------------------------------------------------------------


class Faults:
    """Stands between the program and the file system, counts, and strikes."""

    def __init__(self, fault: Fault, report: str = "") -> None:
        self.fault, self._report = fault, report
        self.active = fault.update is None
        self.count, self.struck = 0, ""
        self.on_death: Callable[[], object] = self.report
        self.on_armed: Callable[[], object] = self._at_once
        self._chooser = random.Random(fault.seed)
        self._root = os.path.realpath(fault.root) + "/"
        self._open = builtins.open

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Strike while the block runs."""
        import mttrain.checkpoint
        import mttrain.run

        plain_sync = os.fsync

        def fsync(handle: Any) -> None:
            number = handle if isinstance(handle, int) else handle.fileno()
            self.step("fsync", os.readlink(f"/proc/self/fd/{number}"))
            plain_sync(handle)

        places: list[tuple[Any, str, Any]] = [
            (os, name, self._wrapped(name, getattr(os, name))) for name in CHANGING
        ]
        places += [(os, "fsync", fsync), (builtins, "open", self._opened)]
        places += [(io, "open", self._opened)]
        places += [(mttrain.checkpoint, "save_file", self._saving(mttrain.checkpoint.save_file))]
        places += [(mttrain.run.Run, "_validate", self._armed(mttrain.run.Run._validate))]
        plain = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
        for owner, name, value in places:
            setattr(owner, name, value)
        try:
            yield
        finally:
            for owner, name, value in plain:
                setattr(owner, name, value)

    def _armed(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def validate(run: Any, progress: Any) -> Any:
            if progress.update == self.fault.update and not self.active:
                self.active = True
                self.on_armed()
            return plain(run, progress)

        return validate

    def _at_once(self) -> None:
        if self.fault.kind == "signal" and self.fault.at == 0:
            self.strike("validation", self.fault.root)

    def _wrapped(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, **named: Any) -> Any:
            where = os.fspath(path) if not isinstance(path, int) else f"/proc/self/fd/{path}"
            if named.get("dir_fd") is not None:
                where = os.path.join(os.readlink(f"/proc/self/fd/{named['dir_fd']}"), where)
            self.step(name, where)
            return plain(path, *arguments, **named)

        return call

    def _opened(self, file: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        if isinstance(file, int) or not set(mode) & set("wax+") or not self._inside(file):
            return self._open(file, mode, *arguments, **named)
        self.step("open", file)
        return _File(self._open(file, mode, *arguments, **named), self, os.fspath(file))

    def _saving(self, plain: Callable[..., None]) -> Callable[..., None]:
        def save_file(tensors: Any, path: Any, *arguments: Any) -> None:
            from safetensors import SafetensorError

            if not self.due("save_file", path):
                plain(tensors, path, *arguments)
                return
            if self.fault.half:
                plain(tensors, path, *arguments)
                with self._open(path, "rb+") as file:
                    file.truncate(os.stat(path).st_size // 2)
            try:
                self.strike("save_file", path)
            except OSError as error:  # as the library tells it
                text = f"Error while serializing: I/O error: {error.strerror} (os error 0)"
                raise SafetensorError(text) from None
            plain(tensors, path, *arguments)

        return save_file

    def _inside(self, path: Any) -> bool:
        return os.path.join(os.getcwd(), os.fspath(path)).startswith(self._root)

    def step(self, name: str, path: Any) -> None:
        """Count an operation that is about to happen, and strike when it is its turn."""
        if self.due(name, path):
            self.strike(name, path)

    def due(self, name: str, path: Any) -> bool:
        """Count an operation; whether it is to be struck."""
        fault = self.fault
        if not self.active or not self._inside(path):
            return False
        if fault.names and name not in fault.names:
            return False
        self.count += 1
        if self.struck and (fault.chance == 0 or fault.kind != "error"):
            return fault.sticky and name in TAKES_SPACE
        return self.count == fault.at or self._chooser.random() < fault.chance

    def strike(self, name: str, path: Any) -> None:
        """Do what the fault says; returns after a signal that did not end the process."""
        self.struck = self.struck or f"{name} {path}"
        if self.fault.kind == "death":
            self.on_death()
            os._exit(DEATH)
        if self.fault.kind == "error":
            number = self.fault.number
            raise OSError(number, os.strerror(number), os.fspath(path))
        self.report()
        for _ in range(self.fault.times):
            signal.raise_signal(self.fault.number)

    def report(self) -> None:
        """Write down what was struck, and how many operations there were."""
        if not self._report:
            return
        with self._open(self._report, "w") as file:
            json.dump({"struck": self.struck, "count": self.count}, file)


class _File:
    """A file open for writing whose operations are counted."""

    def __init__(self, real: Any, faults: Faults, path: str) -> None:
        self._real, self._faults, self._path = real, faults, path
        self._pending = False  # whether closing has something left to write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def write(self, data: Any) -> Any:
        if self._faults.due("write", self._path):
            if self._faults.fault.half:
                self._real.write(data[: len(data) // 2])
                self._real.flush()
            self._faults.strike("write", self._path)
        self._pending = True
        return self._real.write(data)

    def writelines(self, lines: Sequence[Any]) -> None:
        if lines:
            self.write(type(lines[0])().join(lines))

    def truncate(self, size: int | None = None) -> Any:
        self._faults.step("truncate", self._path)
        return self._real.truncate(size)

    def flush(self) -> None:
        self._faults.step("flush", self._path)
        self._pending = False
        self._real.flush()

    def close(self) -> None:
        if self._real.closed:
            return
        try:
            if self._pending:
                self._faults.step("close", self._path)
        finally:
            self._real.close()

    def __enter__(self) -> _File:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._real.close()


def _child(request: dict[str, Any]) -> NoReturn:
    """Become the command of the request, to its end."""
    os.setsid()
    for number, path in enumerate((os.devnull, request["out"], request["err"])):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(handle, number)
        os.close(handle)
    from mttrain.cli import main

    status = 0
    if "call" in request:
        walks = importlib.import_module("tests.system.walk_help")
        result = getattr(walks, request["call"])(**request["arguments"])
        Path(request["report"]).write_text(json.dumps(result))
    elif request["fault"] is None:
        status = main(request["argv"])
    else:
        faults = Faults(Fault(**request["fault"]), request["report"])
        with faults.installed():
            status = main(request["argv"])
        faults.report()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # taking the interpreter apart would cost a second


# ---- the server -------------------------------------------------------------------------------


def _serve() -> int:
    """Fork a child for each request, and tell how it ended."""
    for name in ("mttrain.cli_decode", "mttrain.trainer", "mttrain.translator", "torch._dynamo"):
        importlib.import_module(name)  # the last one comes with the first optimiser
    gc.freeze()
    print("ready", flush=True)
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        if "pid" not in request:
            answer: int | None = os.fork()
            if answer == 0:
                _child(request)
        else:
            answer = _ended(request["pid"], request["timeout"])
        print(json.dumps(answer), flush=True)
    return 0


def _ended(pid: int, timeout: float) -> int | None:
    """The exit status of a child, negative for a signal; None when it still runs."""
    deadline = time.monotonic() + timeout
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            return None
        time.sleep(0.002)


# ---- in the test ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """How a child ended: status as `subprocess` gives it, what it said, and its report."""

    status: int
    err: str
    report: Any

    @property
    def struck(self) -> str:
        """The operation that a fault struck, and its file; "" for none."""
        return str(self.report["struck"]) if self.report else ""


@contextmanager
def quick_folder() -> Iterator[Path]:
    """A temporary folder, in memory where there is such a place: there fsync takes no time."""
    memory = Path("/dev/shm")
    usable = memory.is_dir() and os.access(memory, os.W_OK)
    with tempfile.TemporaryDirectory(dir=memory if usable else None) as folder:
        yield Path(folder)


class Launcher:
    """Starts children through the server. A context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.system.fault_help"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        )  # fmt: skip
        assert self._server.stdout is not None and self._server.stdout.readline() == "ready\n"

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.communicate(timeout=60)

    def start(self, argv: Sequence[str], fault: Fault | None = None) -> Child:
        """Start a command line and return at once."""
        return self._child({"argv": list(argv), "fault": asdict(fault) if fault else None})

    def _child(self, request: dict[str, Any]) -> Child:
        self._number += 1
        base = self._folder / f"child-{self._number}"
        files = {name: f"{base}.{name}" for name in ("out", "err", "report")}
        return Child(self, self.ask(request | files), base)

    def call(self, name: str, **arguments: Any) -> Any:
        """The result of a function of `walk_help` in a child."""
        child = self._child({"call": name, "arguments": arguments})
        ended = child.wait()
        assert ended.status == 0, ended.err
        return ended.report

    def run(self, argv: Sequence[str], fault: Fault | None = None) -> Ended:
        """Start a command line and wait for its end."""
        return self.start(argv, fault).wait()

    def ask(self, request: dict[str, Any]) -> Any:
        """The server's answer."""
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())


class Child:
    """A running command. Its pid stays its own until `wait`, so a signal never meets another."""

    def __init__(self, launcher: Launcher, pid: int, base: Path) -> None:
        self._launcher, self.pid, self._base = launcher, pid, base

    def kill(self, number: int) -> None:
        """Send a signal; one that has ended already ignores it."""
        os.kill(self.pid, number)

    def err(self) -> str:
        """What it has said so far."""
        path = Path(f"{self._base}.err")
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def ended(self) -> bool:
        """Whether it has ended, without waiting for it."""
        return state_of(self.pid) in ("Z", "X", "")

    def wait(self, timeout: float = 300.0) -> Ended:
        """Wait for the end; a hanging child is killed and told as an error."""
        status = self._launcher.ask({"pid": self.pid, "timeout": timeout})
        if status is None:
            os.killpg(self.pid, signal.SIGKILL)
            raise AssertionError(f"a child hangs; it said:\n{self.err()}")
        paths = [Path(f"{self._base}.{name}") for name in ("out", "err", "report")]
        text = paths[2].read_text() if paths[2].exists() else ""
        ended = Ended(status, self.err(), json.loads(text) if text else None)
        for path in paths:
            path.unlink(missing_ok=True)
        return ended


def state_of(pid: int) -> str:
    """The letter of a process's state in /proc; "" when there is none of that number."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def session_members(leader: int) -> list[int]:
    """Processes of the session of a child, itself included, zombies not."""
    members = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader and fields[0] not in "ZX":
            members.append(int(path.parent.name))
    return members


def wait_for_empty_sessions(leaders: Sequence[int], timeout: float = 60.0) -> list[int]:
    """Processes of these sessions that outlive the timeout: none, if all is well.

    Loader workers look every five seconds whether their parent is there.
    """
    deadline = time.monotonic() + timeout
    left = [pid for leader in leaders for pid in session_members(leader)]
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left = [pid for pid in left if state_of(pid) not in ("Z", "X", "")]
    return left


def shared_memory_of_the_dead() -> set[str]:
    """Files of torch in /dev/shm whose maker no longer lives."""
    folder = Path("/dev/shm")
    names = [path.name for path in folder.glob("torch_*")] if folder.is_dir() else []
    return {name for name in names if not state_of(int(name.split("_")[1]))}


if __name__ == "__main__":
    sys.exit(_serve())
