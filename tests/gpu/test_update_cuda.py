"""Updates on a GPU: the same as on a CPU, waiting for nothing, by the kernels that are meant."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from mttrain.attention import Attention
from mttrain.config import ModelConfig
from mttrain.distributed import autocast
from mttrain.dropout import DropoutKeys
from mttrain.masks import mask_bias
from tests.gpu.gpu_help import CPU, GPU, SHAPES, assert_same, new_batch, new_updater, run_updates

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
RDROP = {"rdrop": 1.0}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rdrop": {"optim": RDROP, "ema": 0.9},
    "again": {"activation_checkpointing": True},
}


@pytest.fixture
def group() -> Iterator[None]:
    """NCCL and gloo among one rank."""
    backend = "cpu:gloo,cuda:nccl" if GPU.type == "cuda" else "gloo"
    device = GPU if GPU.type == "cuda" else None
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    yield
    gc.collect()
    dist.destroy_process_group()


@pytest.mark.parametrize("way", WAYS)
def test_trains_what_a_cpu_does(tmp_path: Path, way: str) -> None:
    """M02, M03: in float64 to 1e-9: masks, tables, dropout, loss, fused AdamW, running mean."""
    found = [
        run_updates(new_updater(tmp_path, device, dtype=torch.float64, **WAYS[way]))
        for device in (CPU, GPU)
    ]
    assert_same(*found)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("way", WAYS)
def test_trains_the_same_by_nccl(tmp_path: Path, group: None, kind: str, way: str) -> None:
    """Shards, DTensors in fused AdamW and in clipping, buckets: among one rank."""
    one = run_updates(new_updater(tmp_path, GPU, dtype=torch.float64, **WAYS[way]))
    shared = new_updater(tmp_path, GPU, 2, torch.float64, parallel=kind, **WAYS[way])
    assert_same(one, run_updates(shared))


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_scaler_of_fp16_by_nccl(tmp_path: Path, group: None, kind: str) -> None:
    """It looks at shards, and at sums of all ranks."""
    one = run_updates(new_updater(tmp_path, GPU, precision="fp16"))
    shared = run_updates(new_updater(tmp_path, GPU, 2, precision="fp16", parallel=kind))
    assert_same(one, shared, 1e-2, 1e-3, wanted=lambda name: ":" not in name)


@pytest.mark.parametrize(
    ("tolerance", "settings"),
    [(1e-3, {"tf32": True}), (2e-2, {"precision": "bf16"}), (5e-3, {"precision": "fp16"})],
)
def test_lower_precision_is_near(
    tmp_path: Path, tolerance: float, settings: dict[str, Any]
) -> None:
    """Loss and norm of the gradient: a type that is not what it should be, or a scale that is not
    taken back, shows here."""
    exact, lower = (
        new_updater(tmp_path, GPU, **how).run([new_batch(*SHAPES[0])], 100, 1).read()
        for how in ({}, settings)
    )
    assert lower.sums[0] == pytest.approx(exact.sums[0], rel=tolerance)
    assert lower.norm == pytest.approx(exact.norm, rel=5 * tolerance)
    assert lower.sums != exact.sums, "the same products were made"


@pytest.mark.parametrize("parallel", [None, "ddp", "fsdp"])
@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"precision": "bf16", "optim": RDROP, "ema": 0.9},
        {"precision": "bf16", "activation_checkpointing": True},
        {"precision": "bf16", "compile": True},
        {"precision": "bf16", "compile": True, "activation_checkpointing": True},
    ],
    ids=lambda settings: "-".join(map(str, settings)),
)
def test_no_update_waits_for_the_gpu(
    tmp_path: Path, group: None, parallel: str | None, settings: dict[str, Any]
) -> None:
    """PyTorch raises at each operation that waits: .item(), nonzero, a copy of pageable memory."""
    how = {} if parallel is None else {"ranks": 2, "parallel": parallel}
    updater = new_updater(tmp_path, GPU, **how, **settings)
    batches = [new_batch(*shape).pin_memory() for shape in SHAPES]
    for update in range(1, 7):  # tables, moments, the scale and the code are made
        updater.run([batches[update % 3]], 200, update).read()
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = [updater.run([batches[update % 3]], 200, update) for update in range(7, 10)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(one.read().finite for one in pending)


def test_a_gradient_that_is_not_finite_is_left_out(tmp_path: Path) -> None:
    """Weights, moments and counters stay, though nobody looks before the step."""
    updater = new_updater(tmp_path, GPU)
    assert updater.deferred and updater.optimizer.defaults["fused"]
    before = run_updates(updater)
    outcome = updater.run([new_batch(*SHAPES[0])], math.nan, 7).read()  # type: ignore[arg-type]
    assert not outcome.finite
    assert_same(before, run_updates(updater, 0), atol=0.0)
    counters = [state["step"] for state in updater.optimizer.state.values()]
    assert {(step.device.type, step.item()) for step in counters} == {(GPU.type, 6.0)}


@pytest.mark.parametrize("again", [False, True])
def test_compiled_layers_train_the_same(tmp_path: Path, again: bool) -> None:
    """Up to rounding; and sizes do not multiply the code."""
    torch._dynamo.reset()
    plain = run_updates(new_updater(tmp_path, GPU))
    updater = new_updater(tmp_path, GPU, compile=True, activation_checkpointing=again)
    assert_same(plain, run_updates(updater), 1e-2, 1e-3, wanted=lambda name: ":" not in name)
    assert updater.compiler is not None and 2 <= updater.compiler.graphs <= 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_runs_by_fused_kernels(dtype: torch.dtype) -> None:
    """Flash where there is no mask of padding, the memory-efficient kernel where there is one;
    PyTorch raises when those that are allowed cannot take the inputs."""
    config = ModelConfig(d_model=128, num_heads=2)
    attention = Attention(config, DropoutKeys()).to(GPU)
    x = torch.randn(4, 40, 128, device=GPU, requires_grad=True)
    allowed = torch.arange(40, device=GPU) < torch.tensor([[40], [30], [20], [7]], device=GPU)
    bias = mask_bias(allowed, dtype)[:, None, None, :]
    for backend, mask in (
        (SDPBackend.FLASH_ATTENTION, None),
        (SDPBackend.EFFICIENT_ATTENTION, bias),
    ):
        with sdpa_kernel([backend]), autocast(GPU, dtype):
            out = attention(x, mask, causal=mask is None)
        out.float().sum().backward()
    assert x.grad is not None and bool(x.grad.isfinite().all())
