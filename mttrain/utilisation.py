"""How much of the machine training uses: FLOP/s of the model beside those of a bare product.

What the model needs is counted from the lengths of the pairs (`flops`): a pair costs the same
whatever it is padded to, however a batch is cut and whatever a kernel computes twice. What the
device can do is measured at the start: the fastest of repeated products of two square matrices, in
the type that training multiplies in and by the libraries that it uses. The share of the two is the
model FLOPs utilisation (Chowdhery et al. 2022, appendix B), with a measured peak in place of a data
sheet's: padding, norms, softmax, the optimiser, waiting and communication lower it.

Price: a fraction of a second at the start, some sums for each batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial

import torch
from torch import Tensor

from mttrain.config import RunConfig
from mttrain.dataset import Batch
from mttrain.distributed import World, training_type
from mttrain.flops import model_products
from mttrain.linear import product
from mttrain.progress import Window

PEAK_SECONDS = 0.2  # for the measurement, but for its last products
# Smallest and largest matrices. On a CPU 12 MB in float32, more than small caches hold, and some
# 20 ms a product on a core; on the fastest GPUs a millisecond.
_WIDTHS = {"cpu": (128, 1024), "device": (1024, 8192)}


class Meter:
    """Adds up the work of a window of updates, and says what share of the peak it is.

    peak: FLOP/s of bare products on all processes together, see `measured_peak`; 0 = not measured.
    """

    def __init__(self, config: RunConfig, target_vocab: int) -> None:
        rdrop = config.optim.rdrop > 0
        self.products = model_products(config.model, target_vocab, rdrop=rdrop)
        self.peak = 0.0

    def add(self, window: Window, batch: Batch) -> None:
        """Count the work of one more batch."""
        window.flops += self.products.training(batch.work)
        window.cells += batch.source.numel() + batch.target_out.numel()

    def record(self, sums: Mapping[str, float], seconds: float) -> dict[str, float | None]:
        """Fields of a log record: speeds without padding, the share of padding, FLOP/s.

        sums: over all processes, by the names of `Window`; seconds: that they took.
        """
        sources, targets, cells = sums["source_tokens"], sums["target_tokens"], sums["cells"]
        per_second = 1.0 / seconds if seconds > 0 else 0.0
        speed = sums["flops"] * per_second
        return {
            "tokens_per_second": round(targets * per_second, 1),
            "source_tokens_per_second": round(sources * per_second, 1),
            "nonpadding_per_second": round((sources + targets) * per_second, 1),
            "padding": round(1.0 - (sources + targets) / cells, 4) if cells else 0.0,
            "flops": sums["flops"],
            "flops_per_second": float(f"{speed:.4g}"),
            "utilisation": round(speed / self.peak, 4) if self.peak else None,
        }


def measured_peak(world: World, precision: str) -> tuple[float, str]:
    """FLOP/s of bare matrix products on all processes together, and how they were measured.

    All processes measure at once, since they share memory and cores. precision: of the
    configuration.
    """
    dtype = training_type(precision, world.device)
    world.barrier()
    own, how = matmul_peak(world.device, dtype, torch.get_num_threads())
    return world.sum([own])[0], how


@cache
def matmul_peak(device: torch.device, dtype: torch.dtype, threads: int) -> tuple[float, str]:
    """FLOP/s of the fastest product of two square matrices, and a sentence's part on how.

    Measured once in a process for a device, type and number of threads, which must be those that
    torch has. The matrices are as large as the time allows: a CPU without instructions for a type
    takes minutes where others take milliseconds.
    """
    assert threads == torch.get_num_threads()
    width, largest = _WIDTHS["cpu" if device.type == "cpu" else "device"]
    while width < largest and 8 * _fastest_product(width, device, dtype, 0.0)[0] < PEAK_SECONDS:
        width *= 2
    best, count = _fastest_product(width, device, dtype, PEAK_SECONDS)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    name = str(dtype).removeprefix("torch.")
    return 2.0 * width**3 / best, f"best of {count} products of {width} x {width} in {name}"


def _fastest_product(
    width: int, device: torch.device, dtype: torch.dtype, seconds: float
) -> tuple[float, int]:
    """Seconds of the fastest product of two square matrices, and how many there were."""
    # Of constant numbers a GPU makes more: they cost it less power. The generator is our own.
    chance = torch.Generator(device).manual_seed(1)
    a, b = (torch.randn(width, width, generator=chance, device=device).to(dtype) for _ in range(2))
    # On a CPU training multiplies by two libraries, each where it is the faster one.
    ways: list[Callable[[Tensor, Tensor], Tensor]] = [torch.mm]
    if device.type == "cpu":
        ways.append(product)
    runs = [partial(way, a, b) for way in ways]
    with torch.no_grad():
        for run in runs:  # the first product of a shape prepares a kernel
            run()
        return _fastest(runs, device, seconds)


def _fastest(
    runs: Sequence[Callable[[], object]], device: torch.device, seconds: float
) -> tuple[float, int]:
    """Seconds of the fastest run, and how many there were in so many seconds, each at least one."""
    wait = torch.get_device_module(device).synchronize
    best, count, end = float("inf"), 0, time.perf_counter() + seconds
    while not count or time.perf_counter() < end:
        for run in runs:
            wait()
            start = time.perf_counter()
            run()
            wait()
            best, count = min(best, time.perf_counter() - start), count + 1
    return best, count
