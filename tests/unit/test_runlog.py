"""The log of a run: valid JSON lines whatever happens, and a console that never stops a run."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import torch

from mttrain.errors import DataError
from mttrain.runlog import RunLog, read_log


class Terminal(io.StringIO):
    """A console that calls itself a terminal."""

    def isatty(self) -> bool:
        return True


class Gone(io.StringIO):
    """A terminal whose window was closed."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


def test_records_are_appended_with_kind_and_time(tmp_path: Path) -> None:
    """A record without its kind or time cannot be read back."""
    log = RunLog(tmp_path / "log.jsonl")
    log.event("start", seed=1)
    log.event("train", step=10, loss=2.5, text="Grüße\u2028\n你好")
    first, second = read_log(tmp_path / "log.jsonl")
    assert first["kind"] == "start" and first["seed"] == 1
    assert second["text"] == "Grüße\u2028\n你好"
    assert datetime.fromisoformat(first["time"]).tzinfo is not None
    assert (tmp_path / "log.jsonl").read_bytes().count(b"\n") == 2


def test_values_are_plain_json(tmp_path: Path) -> None:
    """`NaN` is no JSON: one diverged update made the log unreadable for other programs."""
    log = RunLog(tmp_path / "log.jsonl")
    log.event(
        "train",
        loss=math.nan,
        norms=[math.inf, -math.inf, np.float32(0.5)],
        scores={"bleu": torch.tensor(1.5), "n": np.int64(7), 3: (True, None)},
        path=Path("a/b"),
    )

    def refuse(name: str) -> None:
        raise AssertionError(name)

    record = json.loads((tmp_path / "log.jsonl").read_text(), parse_constant=refuse)
    assert record["loss"] == "nan"
    assert record["norms"] == ["inf", "-inf", 0.5]
    assert record["scores"] == {"bleu": 1.5, "n": 7, "3": [True, None]}
    assert record["path"] == "a/b"


def test_torn_last_line_is_ignored_and_then_removed(tmp_path: Path) -> None:
    """R26: after a kill the next record was glued to half a line, and both were lost."""
    path = tmp_path / "log.jsonl"
    RunLog(path).event("train", step=1)
    with open(path, "ab") as file:
        file.write(b'{"kind": "train", "st')
    assert [record["step"] for record in read_log(path)] == [1]
    RunLog(path).event("train", step=2)
    assert [record["step"] for record in read_log(path)] == [1, 2]


def test_truncate_drops_what_the_resumed_run_will_repeat(tmp_path: Path) -> None:
    """R26: after a resume some steps stood in the log twice, others not at all."""
    path = tmp_path / "log.jsonl"
    log = RunLog(path)
    log.event("start")
    for step in range(1, 6):
        log.event("train", step=step)
    with open(path, "ab") as file:
        file.write(b'{"kind": "train", "step": 6')
    before = path.read_bytes()
    resumed = RunLog(path)
    resumed.truncate_after(3)
    assert before.startswith(path.read_bytes())
    for step in range(4, 7):
        resumed.event("train", step=step)
    assert [record.get("step") for record in read_log(path)] == [None, 1, 2, 3, 4, 5, 6]
    assert os.listdir(tmp_path) == ["log.jsonl"]
    RunLog(tmp_path / "none.jsonl").truncate_after(3)
    RunLog(None).truncate_after(3)


def test_a_first_validation_that_comes_again_stands_there_once(tmp_path: Path) -> None:
    """A signal saved an update before its validation; 0, no validation yet, was taken for none
    given, and the record of the validation that was lost stayed. What came before training stays.
    """
    path = tmp_path / "log.jsonl"
    log = RunLog(path)
    log.event("valid", step=0)  # of the weights that fine-tuning began with
    for kind in ("train", "valid", "best"):
        log.event(kind, step=130)
    RunLog(path).truncate_after(130, validated=0)
    assert [(r["kind"], r["step"]) for r in read_log(path)] == [("valid", 0), ("train", 130)]


def test_a_killed_process_loses_no_record(tmp_path: Path) -> None:
    """A buffered log ended hundreds of steps before the process did."""
    path = tmp_path / "log.jsonl"
    code = (
        "import os, sys; from pathlib import Path; from mttrain.runlog import RunLog\n"
        "log = RunLog(Path(sys.argv[1]))\n"
        "for step in range(100): log.event('train', step=step)\n"
        f"os.kill(os.getpid(), {int(signal.SIGKILL)})"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [record["step"] for record in read_log(path)] == list(range(100))


def test_unreadable_logs(tmp_path: Path) -> None:
    """A missing or damaged log is named with its line."""
    with pytest.raises(DataError, match="nowhere: cannot read it"):
        read_log(tmp_path / "nowhere")
    (tmp_path / "log").write_text('{"kind": "a"}\nrubbish\n{"kind": "b"}\n')
    with pytest.raises(DataError, match="log, line 2: not a log record"):
        read_log(tmp_path / "log")
    with pytest.raises(DataError, match="cannot write it"):
        RunLog(tmp_path / "no" / "folder").event("start")


def test_other_ranks_write_and_say_nothing(tmp_path: Path) -> None:
    """Each of N processes printed each line."""
    console = Terminal()
    log = RunLog(None, quiet=True, console=console)
    log.event("start")
    log.say("hello")
    with log.progress(10, 0) as bar:
        bar.update(5, loss=1)
    assert console.getvalue() == "" and os.listdir(tmp_path) == []


def test_bar_shows_steps_values_and_lines_above(tmp_path: Path) -> None:
    """A printed line must not be written into the bar."""
    console = Terminal()
    log = RunLog(None, console=console)
    log.say("before")
    with log.progress(10, initial=2) as bar:
        bar.update(4, loss="3.100")
        log.say("in between")
        bar.update(10, loss="2.000")
    log.say("after")
    text = console.getvalue()
    assert text.startswith("before\n") and text.endswith("\nafter\n")
    assert "10/10" in text and "loss=2.000" in text
    assert "\rin between\n" in text or "\nin between\n" in text


def test_without_terminal_there_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar redrawn into a file fills it with megabytes of carriage returns."""
    console = io.StringIO()
    log = RunLog(None, console=console)
    with log.progress(1000, initial=0) as bar:
        for step in range(1, 500):
            bar.update(step, loss="1.0")
        first = console.getvalue()
        assert first == "update 1 of 1000  loss 1.0\n"  # a sign of life, then silence
        monkeypatch.setattr("mttrain.runlog._PLAIN_EVERY", 0.0)
        bar.update(500, loss="1.0", lr="2e-3")
    assert console.getvalue() == first + "update 500 of 1000  loss 1.0  lr 2e-3\n"


def test_a_closed_terminal_does_not_stop_the_run() -> None:
    """Closing the window over a running job ended it with an input/output error."""
    for console in (Gone(), io.StringIO()):
        log = RunLog(None, console=console)
        if not isinstance(console, Gone):
            console.close()
        log.say("hello")
    log = RunLog(None, console=Gone())
    with log.progress(None, initial=0) as bar:
        bar.update(1, loss=1)
        log.say("hello")
