"""TensorBoard's files hold the numbers of log.jsonl, read back by TensorBoard's own reader."""

from __future__ import annotations

import io
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mttrain.boards import FOLDER, Board, remove_events, scalars
from mttrain.config import RunConfig
from mttrain.errors import MissingDependency
from mttrain.runlog import RunLog, read_log
from mttrain.trainer import train
from tests.integration.training_help import random_sentences, tiny_config, write_pairs


def curves(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    """Tag -> (step, time, value) of everything that TensorBoard shows as a curve."""
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    reader.Reload()
    return {
        tag: [(event.step, event.wall_time, event.value) for event in reader.Scalars(tag)]
        for tag in reader.Tags()["scalars"]
    }


def texts(folder: Path, tag: str) -> list[tuple[int, list[str]]]:
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    reader.Reload()
    return [
        (event.step, [cell.decode() for cell in event.tensor_proto.string_val])
        for event in reader.Tensors(tag)
    ]


def expected(log: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag -> (step, value in float32) from log.jsonl, by rules written out here."""
    found: dict[str, list[tuple[int, float]]] = {}
    for record in read_log(log):
        kind, numbers = record["kind"], dict(record)
        if kind == "candidates":
            numbers = {
                f"{candidate['name']}/{name}": value
                for candidate in record["candidates"]
                for name, value in candidate["scores"].items()
            }
        elif kind == "test":
            numbers = {score["name"].lower(): score["value"] for score in record["scores"]}
        elif kind not in ("train", "valid"):
            continue
        if kind == "train":
            numbers["perplexity"] = math.exp(record["nll"])
        for name, value in numbers.items():
            if name in ("step", "epoch", "beam", "length_penalty") or isinstance(value, str | list):
                continue
            found.setdefault(f"{kind}/{name}", []).append(
                (record["step"], float(np.float32(value)))
            )
    return found


def without_times(
    found: dict[str, list[tuple[int, float, float]]],
) -> dict[str, list[tuple[int, float]]]:
    return {tag: [(step, value) for step, _, value in events] for tag, events in found.items()}


def logged(tmp_path: Path, console: io.StringIO | None = None) -> RunLog:
    log = RunLog(tmp_path / "log.jsonl", console=console)
    log.mirror = Board(tmp_path / FOLDER, log.say)
    return log


def test_numbers_come_back(tmp_path: Path) -> None:
    """Stops a curve that is not the log: other values, steps or times, NaN shown as 0."""
    log = logged(tmp_path)
    log.event("begin", step=0, parameters=7)
    log.event("train", step=10, epoch=0, loss=2.5, nll=1.0, lr=1e-4, grad_norm=math.inf)
    log.event("train", step=20, epoch=0, loss=math.nan, nll=800.0, lr=2e-4, grad_norm=0.5)
    found = curves(tmp_path / FOLDER)
    assert [step for step, _, _ in found["train/lr"]] == [10, 20]
    assert found["train/grad_norm"][0][2] == math.inf
    assert math.isnan(found["train/loss"][1][2])
    values = [value for _, _, value in found["train/perplexity"]]
    assert values == [pytest.approx(math.e), math.inf]
    times = [np.datetime64(r["time"].removesuffix("+00:00")) for r in read_log(log.path or "")]
    seconds = [time for _, time, _ in found["train/lr"]]
    assert seconds == pytest.approx(
        [t.astype("datetime64[ms]").astype(int) / 1e3 for t in times[1:]]
    )


def test_samples_are_text(tmp_path: Path) -> None:
    """Stops samples that TensorBoard's Markdown would print in italics or as a heading."""
    log = logged(tmp_path)
    samples = [{"source": "# a_b_c", "output": "1 < 2 | *x*", "reference": "Grüße 你好"}]
    log.event("valid", step=5, bleu=1.0, samples=samples)
    ((step, cells),) = texts(tmp_path / FOLDER, "valid/samples")
    assert step == 5 and cells[:3] == ["source", "output", "reference"]
    assert cells[3:] == [r"\# a\_b\_c", r"1 \< 2 \| \*x\*", "Grüße 你好"]


def test_steps_do_not_come_twice(tmp_path: Path) -> None:
    """Stops the zigzag after a resume: steps behind the checkpoint stood there twice."""
    log = logged(tmp_path)
    for step in range(1, 7):
        log.event("train", step=step, loss=float(step))
    resumed = logged(tmp_path)
    resumed.truncate_after(3)
    for step in range(4, 9):
        resumed.event("train", step=step, loss=step + 0.5)
    values = without_times(curves(tmp_path / FOLDER))["train/loss"]
    assert values == [(1, 1.0), (2, 2.0), (3, 3.0), *((step, step + 0.5) for step in range(4, 9))]
    assert len(list((tmp_path / FOLDER).iterdir())) == 1


def test_a_board_that_comes_later_has_everything(tmp_path: Path) -> None:
    """Stops a curve that begins in the middle, when the setting is switched on at a resume."""
    plain = RunLog(tmp_path / "log.jsonl")
    plain.event("train", step=1, loss=1.0)
    logged(tmp_path).event("train", step=2, loss=2.0)
    assert without_times(curves(tmp_path / FOLDER)) == {"train/loss": [(1, 1.0), (2, 2.0)]}


def test_files_of_others_stay(tmp_path: Path) -> None:
    """Stops us from removing what is not ours."""
    other = tmp_path / FOLDER / "events.out.tfevents.1.host"
    other.parent.mkdir()
    other.write_bytes(b"")
    logged(tmp_path).event("train", step=1, loss=1.0)
    remove_events(tmp_path / FOLDER)
    assert list((tmp_path / FOLDER).iterdir()) == [other]


def test_numbers_of_the_last_records() -> None:
    """Stops a test score or that of an average from missing."""
    scored = [
        {"name": "average", "scores": {"bleu": 3.0}},
        {"name": "ema", "scores": {"bleu": 2.0}},
    ]
    found = scalars({"kind": "candidates", "step": 9, "candidates": scored, "best": "average"})
    assert found == {"candidates/average/bleu": 3.0, "candidates/ema/bleu": 2.0}
    test = {"kind": "test", "step": 9, "scores": [{"name": "chrF", "value": 4.0}]}
    assert scalars(test) == {"test/chrf": 4.0}
    assert scalars({"kind": "begin", "step": 0, "parameters": 3}) == {}


def test_no_place_is_a_warning(tmp_path: Path) -> None:
    """Stops a run from dying of its pictures."""
    (tmp_path / FOLDER).write_text("a file")
    console = io.StringIO()
    log = logged(tmp_path, console)
    for step in range(3):
        log.event("train", step=step, loss=1.0)
    assert len(read_log(tmp_path / "log.jsonl")) == 3
    assert console.getvalue().count("cannot write it") == 1


def test_full_disk_is_a_warning_and_mended_later(tmp_path: Path) -> None:
    """Stops a full disk (here: a limit on the size of files) from ending the run, and the gap from
    staying in the curves."""
    code = f"""
import resource, sys
from pathlib import Path
from mttrain.boards import Board
from mttrain.runlog import RunLog
folder = Path({str(tmp_path)!r})
log = RunLog(folder / "log.jsonl")
log.mirror = Board(folder / "tensorboard", log.say)
stars = [dict(source="*" * 500, output="", reference="")]  # each twice as long in the table
log.event("valid", step=1, loss=1.0, samples=stars)
size = next((folder / "tensorboard").iterdir()).stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, resource.RLIM_INFINITY))
log.event("train", step=2, loss=2.0)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
log.event("train", step=3, loss=3.0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Training goes on without TensorBoard") == 1
    assert [record["step"] for record in read_log(tmp_path / "log.jsonl")] == [1, 2, 3]
    logged(tmp_path).truncate_after(3)
    found = without_times(curves(tmp_path / FOLDER))
    assert found == {"valid/loss": [(1, 1.0)], "train/loss": [(2, 2.0), (3, 3.0)]}


def config(tmp_path: Path, **settings: Any) -> RunConfig:
    lines = random_sentences(60, 1)
    data = {
        name: write_pairs(tmp_path / "text", name, [(line, line) for line in lines[start::3]])
        for start, name in enumerate(("train", "valid", "test"))
    }
    return tiny_config(
        tmp_path, data, train={"tensorboard": True, "average": 2, "keep_last": 3, **settings}
    )


def test_a_run_and_its_resumption(tmp_path: Path) -> None:
    """Stops curves that differ from log.jsonl, in a run and after it was resumed."""
    first = config(tmp_path)
    train(first)
    run = Path(first.run_dir)
    found = without_times(curves(run / FOLDER))
    assert found == expected(run / "log.jsonl")
    assert {
        "train/loss",
        "valid/bleu",
        "valid/chrf",
        "candidates/average/bleu",
        "test/bleu",
    } <= set(found)
    train(config(tmp_path, max_steps=20))
    again = without_times(curves(run / FOLDER))
    assert again == expected(run / "log.jsonl")
    assert [step for step, _ in again["train/loss"]] == list(range(1, 21))
    assert [step for step, _ in texts(run / FOLDER, "valid/samples")] == [6, 12, 18, 20]
    train(config(tmp_path, tensorboard=False), fresh=True)
    assert not (run / FOLDER).exists()


def test_missing_package_is_told_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stops the first record, after minutes of encoding, from being where it is noticed."""
    wanted = config(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    for dry_run in (True, False):
        with pytest.raises(MissingDependency, match=r"pip install 'mttrain\[tensorboard\]'"):
            train(wanted, dry_run=dry_run)
    assert not Path(wanted.run_dir).exists()
