"""The scripts: they parse, they can be run, and the corpus script keeps its word."""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
SHELL = [
    "scripts/_env.sh",
    "scripts/quickstart",
    "scripts/test",
    "scripts/check",
    "scripts/check_wheel",
    "scripts/slurm_train.sbatch",
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


# ---- Slurm ------------------------------------------------------------------------------------

# `srun` writes down what it is to run, and like the real one kills that when it is told to end;
# `scancel` reaches what it runs; `scontrol` knows two nodes and writes down what it is asked.
SRUN = """#!/usr/bin/env bash
echo "${SRUN_CPUS_PER_TASK:-1} CPUs: $*" > asked
trap 'echo killed >> asked; exit 137' TERM
touch started
for _ in $(seq 600); do
    if [[ -e end ]]; then exit 7; fi
    if [[ -e told ]]; then echo "saved" >> asked; exit 143; fi
    sleep 0.1
done
"""
SCANCEL = """#!/usr/bin/env bash
[[ "$*" == "--signal=TERM 123.0" ]] && touch told
"""
SCONTROL = """#!/usr/bin/env bash
if [[ $1 == show ]]; then printf 'node7\\nnode8\\n'; else echo "$*" > requeued; fi
"""


def start_job(folder: Path) -> subprocess.Popen[str]:
    """The batch script on a machine that pretends to be a cluster, once its step has begun."""
    for name, text in (("srun", SRUN), ("scancel", SCANCEL), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    environment = {
        **os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHON": "python",
        "SLURM_JOB_ID": "123", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "32",
    }  # fmt: skip
    job = subprocess.Popen(
        [PROJECT / "scripts" / "slurm_train.sbatch", "--config", "x.yaml"],
        cwd=folder, env=environment, text=True, stderr=subprocess.PIPE,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (folder / "started").exists():
        assert time.monotonic() < deadline and job.poll() is None
        time.sleep(0.05)
    return job


@needs_bash
def test_slurm_job_meets_at_its_first_node_and_passes_a_failure_on(tmp_path: Path) -> None:
    """Stops nodes from waiting for each other at other places, all processes of a node from sharing
    one CPU, and a failed job from looking done."""
    job = start_job(tmp_path)
    (tmp_path / "end").touch()
    job.communicate(timeout=60)
    assert job.returncode == 7
    asked = (tmp_path / "asked").read_text()
    assert asked.startswith("32 CPUs: ")
    assert "--nnodes 2 " in asked and "--rdzv-endpoint node7:20123 " in asked
    assert asked.endswith("-m mttrain train --config x.yaml\n")
    assert not (tmp_path / "requeued").exists()


@needs_bash
def test_slurm_job_is_queued_again_when_its_time_ends(tmp_path: Path) -> None:
    """Stops a job from being killed in its last minutes without a checkpoint."""
    job = start_job(tmp_path)
    job.send_signal(signal.SIGUSR1)
    job.communicate(timeout=60)
    assert job.returncode == 0
    assert (tmp_path / "asked").read_text().endswith("\nsaved\n")
    assert (tmp_path / "requeued").read_text() == "requeue 123\n"
