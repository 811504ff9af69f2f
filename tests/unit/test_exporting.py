"""The directory of an export, the text it is compared on, and its report."""

from __future__ import annotations

import json
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mttrain.config import RunConfig, dump_config, parse_config
from mttrain.errors import CheckpointError, ConfigError, DataError
from mttrain.exporting import (
    MARKER,
    ExportReport,
    check_lines,
    new_directory,
    run_directory,
    write_report,
)

Files = Callable[..., str]


def fill(output: Path, text: str, *, replace: bool = False) -> None:
    with new_directory(output, replace=replace) as folder:
        assert folder.parent == output.parent and folder != output
        (folder / "deep").mkdir()
        (folder / "deep" / "file").write_text(text)


def content(folder: Path) -> str:
    return (folder / "deep" / "file").read_text()


# ---- the directory ----------------------------------------------------------------------------


def test_appears_whole(tmp_path: Path) -> None:
    """A directory that is half written stood under the final name, or a temporary one stayed."""
    out = tmp_path / "out"
    with new_directory(out, replace=False) as folder:
        (folder / "file").write_text("x")
        assert not out.exists()
    assert sorted(path.name for path in out.iterdir()) == ["file", MARKER]
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("problem", [ValueError("x"), KeyboardInterrupt(), DataError("x")])
def test_a_failure_leaves_nothing(problem: BaseException, tmp_path: Path) -> None:
    """What failed or was interrupted left gigabytes aside, or took the earlier export with it."""
    out = tmp_path / "out"
    fill(out, "old")
    with (
        pytest.raises(type(problem)),
        new_directory(out, replace=True) as folder,
    ):
        (folder / "file").write_text("new")
        raise problem
    assert content(out) == "old" and list(tmp_path.iterdir()) == [out]


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    """A library's error without the name of the output reached the user."""
    out = tmp_path / "out"
    with (
        pytest.raises(DataError, match=r"out: cannot write the export: No space"),
        new_directory(out, replace=False),
    ):
        raise OSError(28, "No space left on device")
    assert not list(tmp_path.iterdir())


def test_replaces_an_export_only_when_asked(tmp_path: Path) -> None:
    out = tmp_path / "out"
    fill(out, "one")
    with pytest.raises(ConfigError, match=r"earlier export; add --replace"):
        fill(out, "two")
    assert content(out) == "one"
    (out / "another").write_text("x")
    fill(out, "three", replace=True)
    assert content(out) == "three" and not (out / "another").exists()
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("replace", [False, True])
def test_never_replaces_anything_else(replace: bool, tmp_path: Path) -> None:
    """--replace removed a directory that was no export."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("x")
    with pytest.raises(ConfigError, match="no export"):
        fill(mine, "x", replace=replace)
    with pytest.raises(ConfigError, match="is a file"):
        fill(mine / "thesis.txt", "x", replace=replace)
    assert (mine / "thesis.txt").read_text() == "x"
    assert list(tmp_path.iterdir()) == [mine]


@pytest.mark.parametrize("replace", [False, True])
def test_files_that_came_meanwhile_stay(replace: bool, tmp_path: Path) -> None:
    """What somebody put there while the export was written was taken for an earlier export."""
    out = tmp_path / "out"
    with (
        pytest.raises(ConfigError, match="no export"),
        new_directory(out, replace=replace),
    ):
        out.mkdir()
        (out / "thesis.txt").write_text("x")
    assert (out / "thesis.txt").read_text() == "x" and list(tmp_path.iterdir()) == [out]


def test_an_empty_directory_is_filled(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    fill(out, "x")
    assert content(out) == "x"


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the folder .*nowhere does not exist; make it first"):
        fill(tmp_path / "nowhere" / "out", "x")


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    """The link that named the output became a directory beside the one that is served."""
    real, link = tmp_path / "real", tmp_path / "link"
    fill(real, "one")
    link.symlink_to(real)
    with new_directory(link, replace=True) as folder:
        (folder / "deep").mkdir()
        (folder / "deep" / "file").write_text("two")
    assert link.is_symlink() and content(real) == "two"


def test_files_are_readable_as_the_directory_is(tmp_path: Path) -> None:
    """Weights written by a library were readable by their owner alone."""
    out = tmp_path / "out"
    with new_directory(out, replace=False) as folder:
        (folder / "file").write_text("x")
        (folder / "file").chmod(0o600)
    mode = stat.S_IMODE(out.stat().st_mode)
    assert stat.S_IMODE((out / "file").stat().st_mode) == mode & 0o666


KILLED = """
import sys, time
from pathlib import Path
from mttrain.exporting import new_directory
with new_directory(Path(sys.argv[1]), replace=True) as folder:
    (folder / "file").write_text("half")
    print("ready", flush=True)
    time.sleep(600)
"""


def start_writing(out: Path) -> subprocess.Popen[str]:
    """A process that is in the middle of an export."""
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(out)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_what_a_kill_left_goes_with_the_next_export(tmp_path: Path) -> None:
    """Each killed export left a model on the disk for ever; or one that ran was swept away."""
    out = tmp_path / "out"
    fill(out, "old")
    with start_writing(out) as process:
        (aside,) = (path for path in tmp_path.iterdir() if path != out)
        fill(tmp_path / "out", "between", replace=True)
        assert (aside / "file").read_text() == "half"  # alive: not touched
        process.send_signal(signal.SIGKILL)
    assert content(out) == "between" and aside.exists()
    fill(out, "new", replace=True)
    assert list(tmp_path.iterdir()) == [out] and content(out) == "new"


def test_an_export_that_stepped_aside_comes_back(tmp_path: Path) -> None:
    """A kill between the two renames of --replace lost the earlier export."""
    out = tmp_path / "out"
    fill(out, "old")
    out.rename(tmp_path / ".tmp-out-0123-old")
    with pytest.raises(ConfigError, match="earlier export"):
        fill(out, "new")
    assert content(out) == "old" and list(tmp_path.iterdir()) == [out]


# ---- text to compare on -----------------------------------------------------------------------


def config(valid: dict[str, str]) -> RunConfig:
    data = {"source_lang": "en", "target_lang": "de", "train": valid, "valid": valid}
    return parse_config({"run_dir": "x", "data": data, "train": {"max_steps": 1}})


@pytest.fixture
def run(random_run: Path, tmp_path: Path, files: Files) -> Path:
    """A run directory with the settings that name a validation text of 3 lines, one blank."""
    shutil.copytree(random_run, tmp_path / "run")
    valid = {"source": files("v.en", ["a", " ", "b"]), "target": files("v.de", ["c", "d", "e"])}
    (tmp_path / "run" / "config.yaml").write_text(dump_config(config(valid)), encoding="utf-8")
    return tmp_path / "run"


def test_validation_text_is_the_default(run: Path, files: Files) -> None:
    assert check_lines(str(run), None) == ["a", "b"]
    assert check_lines(str(run), None, 1) == ["a"]
    given = files("given", ["x", "", "y", "z"])
    assert check_lines(str(run), given, 2) == ["x", "y"]
    (checkpoint,) = (run / "checkpoints").glob("step-*")
    assert check_lines(str(checkpoint), None) == ["a", "b"]
    assert run_directory(str(checkpoint)) == run


def test_without_text_the_error_says_what_to_give(
    random_run: Path, run: Path, files: Files, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"no config.yaml .* give some with --lines F"):
        check_lines(str(random_run), None)
    with pytest.raises(DataError, match="holds no text"):
        check_lines(str(run), files("blank", ["", " "]))
    (tmp_path / "v.en").unlink()
    with pytest.raises(ConfigError, match=r"v\.en: cannot read it.* --lines F"):
        check_lines(str(run), None)
    with pytest.raises(CheckpointError, match="does not exist"):
        check_lines(str(tmp_path / "nothing"), None)


# ---- the report -------------------------------------------------------------------------------


def test_report(tmp_path: Path) -> None:
    report = ExportReport(
        str(tmp_path / "out"), "huggingface", 9, 8, 2.5e-06, ("One line is a tie.",)
    )
    head, note = report.text().split("\n")
    assert head.endswith(
        "out (huggingface): 8 of 9 lines translated alike, logits differ by at most 2.5e-06"
    )
    assert note == "One line is a tie."
    assert json.loads(json.dumps(report.to_dict()))["notes"] == ["One line is a tie."]
    without = ExportReport("out", "ctranslate2", 9, 9, None)
    assert without.text() == "out (ctranslate2): 9 of 9 lines translated alike"
    write_report(tmp_path, report)
    kept = json.loads((tmp_path / MARKER).read_text(encoding="utf-8"))
    assert kept["equal"] == 8 and str(tmp_path) not in json.dumps(kept)
