"""Several processes of one training: started by hand or by torchrun, with an accident if wanted."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from mttrain.config import RunConfig, dump_config

LIMIT = 600  # seconds until a hang is a failure; hardly any are needed

# Several trainings one after the other in float64, each with a process group of its own; and a
# signal to one rank, right before one of its updates, in the first start of the job.
RANK = """
import os, signal, sys
import torch
import mttrain.loop
from mttrain.cli import main

torch.set_default_dtype(torch.float64)
ports, rank, update, number, deferred = sys.argv[1:6]
exec(os.environ.get("BEFORE", ""))
plain = mttrain.loop.Trainer._update
first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"

def with_accident(self, *arguments):
    self.updater.deferred = bool(int(deferred))
    if first and self.world.rank == int(rank) and self.progress.update + 1 == int(update):
        os.kill(os.getpid(), int(number))
    plain(self, *arguments)

mttrain.loop.Trainer._update = with_accident
status = 0
for port, config in zip(ports.split(","), sys.argv[6:]):
    if port != "-":
        os.environ["MASTER_PORT"] = port
    status = status or main(["train", "--config", config])
sys.exit(status)
"""


@dataclass(frozen=True)
class Accident:
    """A signal that `rank` gets right before `update`."""

    rank: int
    update: int
    number: signal.Signals


NONE = Accident(-1, -1, signal.SIGTERM)


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def _script(folder: Path, configs: Sequence[RunConfig]) -> list[str]:
    """The script and the files of the configurations, in the folder."""
    (folder / "rank.py").write_text(RANK)
    names = []
    for number, config in enumerate(configs):
        path = folder / f"{Path(config.run_dir).name}-{number}.yaml"
        path.write_text(dump_config(config))
        names.append(str(path))
    return names


def _environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


def run_ranks(
    folder: Path,
    configs: Sequence[RunConfig],
    *,
    ranks: int = 2,
    accident: Accident = NONE,
    deferred: bool = False,
    before: str = "",
) -> list[tuple[int, str]]:
    """Exit status and stderr of each rank, after the trainings one after the other.

    before: code that each rank runs first. Whoever is still there at the limit is killed, and the
    test fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = _script(folder, configs)
    ports = ",".join(_free_port() for _ in configs)
    faults = [str(accident.rank), str(accident.update), str(int(accident.number))]
    command = [sys.executable, str(folder / "rank.py"), ports, *faults, str(int(deferred)), *files]
    processes = []
    try:
        for rank in range(ranks):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
            environment = _environment(
                MASTER_ADDR="127.0.0.1",
                BEFORE=before,
                **{name: str(value) for name, value in place.items()},
            )
            with open(folder / f"rank-{rank}.err", "w") as err:
                processes.append(
                    subprocess.Popen(
                        command, stdout=subprocess.DEVNULL, stderr=err, env=environment
                    )
                )
        statuses = [process.wait(timeout=LIMIT) for process in processes]
    finally:
        for process in processes:
            process.kill()
    texts = [(folder / f"rank-{rank}.err").read_text() for rank in range(ranks)]
    return list(zip(statuses, texts, strict=True))


def finish_ranks(folder: Path, configs: Sequence[RunConfig], **options: object) -> None:
    """The same, where all is to go well."""
    for status, err in run_ranks(folder, configs, **options):  # type: ignore[arg-type]
        assert status == 0, err[-3000:]


def run_torchrun(
    folder: Path, config: RunConfig, *, restarts: int, accident: Accident
) -> tuple[int, str]:
    """Two ranks under torchrun: its exit status, and what all said on stderr."""
    folder.mkdir(parents=True, exist_ok=True)
    files = _script(folder, [config])
    faults = [str(accident.rank), str(accident.update), str(int(accident.number))]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "--max-restarts", str(restarts), "--monitor-interval", "0.5", str(folder / "rank.py"), "-",
        *faults, "0", *files,
    ]  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=_environment()
    )
    try:
        err = process.communicate(timeout=LIMIT)[1]
    finally:
        process.terminate()  # it takes its ranks along
        process.wait()
    return process.returncode, err


def tensors(run: Path, step: int) -> dict[str, Tensor]:
    """Weights, moments and running means of a checkpoint, by name."""
    folder = run / "checkpoints" / f"step-{step:08d}"
    state = load_file(folder / "training.safetensors")
    return {**state, **load_file(folder / "model.safetensors")}
