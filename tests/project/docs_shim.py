"""Stands for `mttrain` and for Python while the blocks of the documentation are run.

Importing torch takes a second or two for each command, and the pages hold some hundred of them. So
one process imports everything once (`serve`), and each command is a fork of it that has the
directory, environment and streams of its caller (`call`): the shell of a block sees programs with
pipes, signals and exit statuses as ever. `real` starts true processes instead.

Training is made short, here and nowhere else: `mttrain train` gets the settings of `SHORT` on its
command line, and in Python blocks `load_config` gets them. They are told on stderr.

    python docs_shim.py serve SOCKET
    python docs_shim.py call SOCKET mttrain ARGUMENTS...     as `mttrain ARGUMENTS...`
    python docs_shim.py call SOCKET as-is ARGUMENTS...       the same, training as long as it says
    python docs_shim.py call SOCKET session                  Python files named on stdin, one state
    python docs_shim.py real SOCKET ...                      the same without the server
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from typing import Any

SHORT = {
    "model.d_model": "16",
    "model.d_ff": "32",
    "model.num_heads": "2",
    "model.encoder_layers": "1",
    "model.decoder_layers": "1",
    "tokenizer.vocab_size": "300",
    "optim.warmup_steps": "2",
    "train.valid_every": "3",
    "train.max_steps": "6",
    "decode.max_length": "12",
}
LATER = "9"  # max_steps where the command itself names a limit: more than the file's, so it goes on
# A vocabulary that exists already cannot be given a size.
EXISTING = re.compile(r"^[^#\n]*\b(source_|target_)?path:", re.MULTILINE)
# Nor can a model that training begins with be given other settings.
BEGUN = re.compile(r"^[^#\n]*\binit_from:", re.MULTILINE)


def short_settings(config: str, given: Sequence[str]) -> list[str]:
    """The values of `--set` that make a training of this YAML file and these settings short."""
    try:
        with open(config, encoding="utf-8") as file:
            text = file.read()
    except OSError:
        return []  # the command itself will say that there is no such file
    short, said = dict(SHORT), "\n".join([text, *(x.replace("=", ": ") for x in given)])
    begun = BEGUN.search(said) is not None
    if begun or EXISTING.search(said):
        del short["tokenizer.vocab_size"]
    if begun:
        short = {key: value for key, value in short.items() if not key.startswith("model.")}
    if any(x.startswith("train.max_steps=") for x in given):
        short["train.max_steps"] = LATER
    return [f"{key}={value}" for key, value in short.items()]


def shortened(args: Sequence[str]) -> list[str]:
    """The arguments of `mttrain`, with settings behind those of `train`."""
    words = list(args)
    if words[:1] != ["train"] or "--config" not in words[:-1]:
        return words
    given = [b for a, b in itertools.pairwise(words) if a == "--set"]
    more = short_settings(words[words.index("--config") + 1], given)
    print(f"[shortened: {' '.join(more)}]", file=sys.stderr, flush=True)
    return [*words, *(word for value in more for word in ("--set", value))]


# ---- the work of one process --------------------------------------------------------------------


def mttrain_status(args: Sequence[str]) -> int:
    """Run a command line as `mttrain` does; its exit status."""
    from mttrain.cli import main

    sys.argv = ["mttrain", *args]
    return main(args)


def session_status() -> int:
    """Execute the Python files named on stdin in one namespace; a line on stdout after each."""
    from mttrain import config

    true_load = config.load_config

    def load_config(path: Any, overrides: Sequence[str] = ()) -> Any:
        return true_load(path, [*overrides, *short_settings(os.fspath(path), overrides)])

    config.load_config = load_config
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the blocks print goes to the log
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for line in sys.stdin:
        name = line.rstrip("\n")
        try:
            with open(name, encoding="utf-8") as file:
                exec(compile(file.read(), name, "exec"), namespace)
        except BaseException:
            traceback.print_exc()
            return 1
        sys.stdout.flush()
        print("done", file=answers, flush=True)
    return 0


def work(words: Sequence[str]) -> int:
    """The exit status of `mttrain ARGUMENTS...` or of `session`."""
    sys.path.insert(0, os.getcwd())
    return mttrain_status(words[1:]) if words[0] == "mttrain" else session_status()


# ---- server and caller --------------------------------------------------------------------------


def serve(path: str) -> None:
    """Import once, then fork for every caller, until stdin closes."""
    import importlib
    import pkgutil
    import select

    import mttrain

    for module in pkgutil.iter_modules(mttrain.__path__, "mttrain."):
        if module.name != "mttrain.__main__":
            importlib.import_module(module.name)
    # What training and pictures import when they begin; the first takes seconds.
    for name in ("torch._dynamo", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        print("ready", flush=True)
        while True:
            readable, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in readable:
                os._exit(0)  # the test has ended; taking torch down would last seconds
            reap()
            caller, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                answer(caller)
            caller.close()


def reap() -> None:
    """Take note of the children that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _writer(descriptor: int) -> io.TextIOWrapper:
    """A text stream as a new interpreter has it."""
    file = io.BufferedWriter(io.FileIO(descriptor, "w", closefd=False))
    return io.TextIOWrapper(file, line_buffering=descriptor == 2, errors="backslashreplace")


def answer(caller: socket.socket) -> None:
    """In a child of the server: become the process that the caller stands for."""
    status = 1
    try:
        data, streams, _, _ = socket.recv_fds(caller, 1 << 16, 3)
        while not data.endswith(b"\n"):
            data += caller.recv(1 << 16)
        request = json.loads(data)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
        sys.stdout, sys.stderr = _writer(1), _writer(2)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["environment"])
        caller.sendall(f"{os.getpid()}\n".encode())
        status = work(request["words"])
        sys.stdout.flush()
        sys.stderr.flush()
        caller.sendall(f"{status}\n".encode())
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def call(path: str, words: Sequence[str]) -> int:
    """Let the server run the words with the streams of this process; the exit status."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        request = {"words": list(words), "cwd": os.getcwd(), "environment": dict(os.environ)}
        data = (json.dumps(request) + "\n").encode()
        socket.send_fds(server, [data[:1024]], [0, 1, 2])
        server.sendall(data[1024:])
        lines = server.makefile()
        child = int(lines.readline())

        def forward(number: int, _: object) -> None:
            os.kill(child, number)

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, forward)
        status = lines.readline()  # nothing: the child was killed
        return int(status) if status else 128 + signal.SIGKILL


def main() -> int:
    role, path, *words = sys.argv[1:]
    if role == "serve":
        serve(path)
        return 0
    if words[0] == "mttrain":
        words = ["mttrain", *shortened(words[1:])]
    elif words[0] == "as-is":
        words[0] = "mttrain"
    return call(path, words) if role == "call" else work(words)


if __name__ == "__main__":
    sys.exit(main())
