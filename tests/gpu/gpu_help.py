"""Updates on a GPU, without the run around them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mttrain.dataset import Batch, Example, collate
from mttrain.distributed import World, allow_tf32
from mttrain.model import Transformer
from mttrain.tokenizer import EOS_ID
from mttrain.update import Updater
from tests.integration.training_help import tiny_config

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
VOCAB = 64
# Rows and lengths that compiled code needs no padding for, and long enough for the masks of
# attention weights to be the same on a CPU (`attention.VECTOR`).
SHAPES = (8, 24, 16), (12, 16, 32), (4, 40, 24)


def new_batch(rows: int, source: int, target: int) -> Batch:
    """Random pairs, all but one shorter than the longest; the same for the same sizes."""
    chance = torch.Generator().manual_seed(rows)

    def ids(longest: int, row: int) -> Any:
        length = longest if row == 0 else int(torch.randint(2, longest, (), generator=chance))
        words = torch.randint(4, VOCAB, (length - 1,), generator=chance)
        return torch.cat((words, torch.tensor([EOS_ID]))).numpy().astype("uint32")

    return collate([Example(ids(source, row), ids(target, row), row) for row in range(rows)])


def new_updater(
    folder: Path,
    device: torch.device,
    ranks: int = 1,
    dtype: torch.dtype = torch.float32,
    optim: dict[str, Any] | None = None,
    **train: Any,
) -> Updater:
    """A small model and its optimiser on the device; train: settings of that section.

    ranks: with 2, in a process group of one, everything is done as in a job of several; what an
    update divides by must then be doubled.
    """
    files = {"source": "a", "target": "b"}
    config = tiny_config(
        folder, {"train": files, "valid": files},
        model={"d_model": 64, "d_ff": 128, "encoder_layers": 2, "decoder_layers": 2},
        optim=optim or {}, train={"precision": "fp32", "device": device.type, **train},
    )  # fmt: skip
    allow_tf32(config.train.tf32, device)
    torch.manual_seed(1)
    model = Transformer(config.model, VOCAB, VOCAB).to(device, dtype).train()
    return Updater(config, model, World(0, ranks, device), str)


def run_updates(updater: Updater, count: int = 6) -> dict[str, torch.Tensor]:
    """Weights, moments and running means after some updates, by name, on the CPU."""
    for update in range(1, count + 1):
        batch = new_batch(*SHAPES[update % len(SHAPES)])
        divisor = batch.target_tokens * updater.world.size
        assert updater.run([batch], divisor, update).read().finite
    state = updater.state().tensors
    updater.parallel.collect()
    found = {**dict(updater.parallel.model.named_parameters()), **state}
    return {name: value.detach().cpu().clone() for name, value in found.items()}


def assert_same(
    first: dict[str, torch.Tensor],
    second: dict[str, torch.Tensor],
    rtol: float = 0.0,
    atol: float = 1e-9,
    wanted: Callable[[str], bool] = lambda name: True,
) -> None:
    """Equal but for rounding; wanted: of which names."""
    assert first.keys() == second.keys()
    for name, value in first.items():
        if wanted(name):
            torch.testing.assert_close(
                value, second[name], rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}"
            )
