"""The scripts: they parse, they can be run, and the corpus script keeps its word."""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
SHELL = [
    "scripts/_env.sh",
    "scripts/quickstart",
    "scripts/test",
    "scripts/check",
    "scripts/check_wheel",
    ".ci/run",
]
GET_MULTI30K = PROJECT / "scripts" / "get_multi30k.py"

needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")


@needs_bash
@pytest.mark.parametrize("name", SHELL)
def test_shell_scripts_parse(name: str) -> None:
    """Stops a slip in a script that no test runs."""
    answer = subprocess.run(["bash", "-n", PROJECT / name], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    text = (PROJECT / name).read_text(encoding="utf-8")
    if name != "scripts/_env.sh":  # sourced by the others
        assert os.access(PROJECT / name, os.X_OK)
        assert text.startswith("#!/usr/bin/env bash\n")
        assert "\nset -euo pipefail\n" in text


def test_scripts_name_no_package_host() -> None:
    """Stops an index from being fixed in a script: pip's own settings decide where packages are."""
    for path in [*(PROJECT / "scripts").iterdir(), PROJECT / ".ci" / "run"]:
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            assert "--index-url" not in text and "pypi.org" not in text, path


@needs_bash
def test_old_python_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """Stops a quick start on Python 3.10 from ending in pip's resolver messages."""
    (tmp_path / "scripts").mkdir()
    for name in ("_env.sh", "test"):
        shutil.copy(PROJECT / "scripts" / name, tmp_path / "scripts" / name)
    answer = subprocess.run(
        ["bash", tmp_path / "scripts" / "test"],
        env={**os.environ, "PYTHON": "/bin/false"},
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 1
    assert answer.stderr.startswith("error: Python 3.11 or newer is needed")
    assert answer.stderr.count("\n") == 1
    assert not (tmp_path / ".venv").exists()


def get_multi30k(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(GET_MULTI30K), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_wrong_sum_writes_nothing(tmp_path: Path) -> None:
    """Stops a damaged or changed download from becoming training data."""
    packed = tmp_path / "packed"
    packed.mkdir()
    (packed / "train.en.gz").write_bytes(gzip.compress(b"not the corpus\n"))
    answer = get_multi30k("--from", packed, "--output", tmp_path / "out", "--languages", "en")
    assert answer.returncode == 3
    assert answer.stderr.startswith("error: ") and answer.stderr.count("\n") == 1
    assert "train.en.gz" in answer.stderr
    assert not (tmp_path / "out").exists()


def test_missing_folder_is_one_line(tmp_path: Path) -> None:
    answer = get_multi30k("--from", tmp_path / "nowhere", "--output", tmp_path / "out")
    assert answer.returncode == 3
    assert answer.stderr.startswith("error: cannot read ") and answer.stderr.count("\n") == 1


def test_unpacks_the_real_corpus(tmp_path: Path) -> None:
    """Needs the packed files: MULTI30K_PACKED names their folder."""
    folder = os.environ.get("MULTI30K_PACKED")
    if not folder:
        pytest.skip("MULTI30K_PACKED is not set")
    answer = get_multi30k("--from", folder, "--output", tmp_path)
    assert answer.returncode == 0, answer.stderr
    lines = {p.name: p.read_bytes().count(b"\n") for p in tmp_path.iterdir()}
    wanted = {"train": 29000, "val": 1014, "test_2016_flickr": 1000}
    assert lines == {
        f"{part}.{lang}": n for part, n in wanted.items() for lang in ("en", "de", "fr")
    }
    found = hashlib.sha256((tmp_path / "val.de").read_bytes()).hexdigest()
    assert found == "660e09eb7e1da2f856ea13ee5ad3cf6d36b3d5b0b733c857e94c5747a3dfc660"
