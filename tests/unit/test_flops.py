"""The count of products against PyTorch's own counter, which sees each of them run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mttrain.config import ModelConfig
from mttrain.flops import LengthSums, model_products
from mttrain.model import Transformer
from mttrain.update import StepModule

SMALL = {"d_model": 8, "d_ff": 12, "num_heads": 2, "encoder_layers": 1, "decoder_layers": 1}


def added_in_place(total: Any, a: tuple[int, int], b: tuple[int, int], **_: Any) -> int:
    """`addmm_`, which the counter does not know: a [n, k] times b [k, m]"""
    return 2 * a[0] * a[1] * b[1]


IN_PLACE = {torch.ops.aten.addmm_: added_in_place}


def counted(
    model: ModelConfig, vocab: tuple[int, int], source: list[int], target: list[int], rdrop: float
) -> tuple[int, int]:
    """FLOPs of the forward pass without gradients, and of training, as the counter sees them.

    In float64 no layer takes a path of its own that rounds the number of rows.
    """
    step = StepModule(Transformer(model, *vocab).double().train(), 0.1, rdrop)
    sides = []
    for lengths, size in zip((source, target, target), (vocab[0], vocab[1], vocab[1]), strict=True):
        ids = torch.randint(4, size, (len(lengths), max(lengths)))
        for row, length in zip(ids, lengths, strict=True):
            row[length:] = 0
        sides.append(ids)
    found = []
    with sdpa_kernel(SDPBackend.MATH):  # the counter knows no fused kernel of a CPU
        for training in (False, True):
            counter = FlopCounterMode(display=False, custom_mapping=IN_PLACE)
            with torch.set_grad_enabled(training), counter:
                sums = step(*sides)
                if training:
                    sums.smoothed.backward()
            found.append(counter.get_total_flops())
    return found[0], found[1]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie": "none"},
        {"tie": "target", "norm": "pre", "activation": "gelu"},
        {"activation": "swiglu", "encoder_layers": 3},
        {"d_model": 9, "d_ff": 7, "num_heads": 3, "decoder_layers": 2, "attention_dropout": 0.2},
        {"d_model": 5, "num_heads": 1, "positions": "learned", "max_positions": 400},
    ],
)
@pytest.mark.parametrize("rdrop", [0.0, 5.0])
def test_count_is_what_runs(changes: dict[str, Any], rdrop: float) -> None:
    """A forgotten product, or one counted twice, makes every figure of utilisation a wrong one."""
    model = ModelConfig.model_validate({**SMALL, **changes})
    vocab = (23, 23) if model.tie == "all" else (23, 31)
    products = model_products(model, vocab[1], rdrop=rdrop > 0)
    # Lengths above the shortest for which attention is padded (16); the last go past its fast path.
    for source, target in (([17, 20, 19], [23, 18, 5]), ([131, 20], [30, 33]), ([20], [140])):
        full = ([max(side)] * len(side) for side in (source, target))
        sums = LengthSums.of(*full)
        forward = products.forward(sums, sum(target))
        assert counted(model, vocab, source, target, rdrop) == (forward, 3 * forward)


def test_sums_of_a_corpus() -> None:
    """The sums over a corpus are those of its pairs one by one, in numbers beyond 32 bits."""
    generator = np.random.default_rng(5)
    source, target = (generator.integers(1, 70000, 50, dtype=np.int32) for _ in range(2))
    products = model_products(ModelConfig(tie="none"), 100)
    each = [
        products.training(LengthSums(s, t, s * s, t * t, s * t))
        for s, t in zip(source.tolist(), target.tolist(), strict=True)
    ]
    assert products.training(LengthSums.of(source, target)) == sum(each)


def test_six_per_parameter() -> None:
    """The rule of thumb, 6 FLOPs for each parameter and position, is near for a usual model."""
    model = ModelConfig(d_model=512, d_ff=2048, num_heads=8, encoder_layers=6, decoder_layers=6)
    with torch.device("meta"):
        parameters = Transformer(model, 37000, 37000).parameter_count()
    flops = model_products(model, 37000).training(LengthSums.of([30], [30]))
    # Each position passes about half of the layers; the source embedding is tied to the output.
    assert flops / (6 * parameters * 30) == pytest.approx(1.0, abs=0.1)
