"""The memory model against what autograd keeps and what an optimiser holds."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from mttrain.compiling import prepare_layers
from mttrain.config import ModelConfig
from mttrain.dataset import Batch
from mttrain.distributed import World
from mttrain.memory import (
    BatchShape,
    Memory,
    Setting,
    Sizes,
    _decoder_layer,
    attention_kernel,
    saved_activations,
    training_memory,
    weight_copies,
)
from mttrain.model import Transformer
from mttrain.update import StepModule, Updater
from tests.integration.training_help import tiny_config

SMALL = {"d_model": 16, "d_ff": 24, "num_heads": 2, "encoder_layers": 2, "decoder_layers": 3}
LONG = BatchShape(3, 133, 140)  # beyond the fast path of a CPU: what a GPU computes
SHORT = BatchShape(5, 21, 17)


def kept(step: StepModule, shape: BatchShape, half: bool, keep: list[Any] | None = None) -> int:
    """Bytes of all memory that autograd keeps of a step, each block once, parameters not; keep:
    takes the step and its tensors."""
    blocks: dict[int, tuple[int, Tensor]] = {}
    own = {p.untyped_storage().data_ptr() for p in step.parameters()}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            blocks[storage.data_ptr()] = (storage.nbytes(), tensor)  # held: no address comes twice
        return tensor

    vocab = step.model.lm_head.out_features
    source = torch.randint(4, vocab, (shape.rows, shape.source))
    target = torch.randint(4, vocab, (shape.rows, shape.target))
    low = torch.autocast("cpu", torch.bfloat16) if half else nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), low:
        sums = step(source, target.clone(), target)
    assert sums.smoothed.requires_grad
    if keep is not None:
        keep += [tensor for _, tensor in blocks.values()] + [sums.smoothed]
    return sum(size for size, _ in blocks.values())


@pytest.mark.parametrize(
    ("changes", "rdrop"),
    [
        ({}, False),
        ({}, True),
        ({"norm": "pre", "word_dropout": 0.1, "tie": "none"}, False),
        ({"activation": "gelu", "activation_dropout": 0.1}, False),
        ({"activation": "swiglu", "d_model": 18, "num_heads": 3, "dropout": 0.0}, False),
        ({"attention_dropout": 0.1, "decoder_layers": 1}, False),
    ],
)
@pytest.mark.parametrize("shape", [LONG, SHORT])
def test_activations_of_full_precision(
    changes: dict[str, Any], rdrop: bool, shape: BatchShape
) -> None:
    """What a layer keeps was forgotten or counted twice: a batch that fits is refused, or one that
    does not is begun. In float64: no layer of a CPU rounds its rows there."""
    model = ModelConfig.model_validate({**SMALL, **changes})
    step = StepModule(Transformer(model, 50, 50).double().train(), 0.1, 1.0 if rdrop else 0.0)
    kernel = attention_kernel(model, True, shape)
    setting = Setting(model, 50, 50, wide=8, narrow=8, kernel=kernel, rdrop=rdrop)
    found = saved_activations(setting, shape) + weight_copies(setting)
    assert kept(step, shape, half=False) == found


@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_activations_of_half_precision(activation: Any, norm: Any) -> None:
    """The same under autocast, where inputs and weights of a product are copied."""
    model = ModelConfig.model_validate({**SMALL, "activation": activation, "norm": norm})
    step = StepModule(Transformer(model, 50, 50).train(), 0.1)
    setting = Setting(model, 50, 50, narrow=2)
    found = saved_activations(setting, LONG) + weight_copies(setting)
    assert kept(step, LONG, half=True) == found


@pytest.mark.parametrize("half", [False, True])
def test_activations_that_wait_for_recomputing(half: bool) -> None:
    """Of layers that are computed again their inputs are kept, by Python and not by autograd: all
    tensors that a forward pass leaves, but for the pass itself and tables of random numbers. The
    encoder's last layer was counted once more for each layer of the decoder."""
    model = ModelConfig.model_validate(SMALL)
    built = Transformer(model, 50, 50).train()
    built = built if half else built.double()
    prepare_layers(built, torch.device("cpu"), None, recompute=True)
    step = StepModule(built, 0.1)
    before = {id(tensor) for tensor in living()}
    autograds = kept(step, LONG, half, keep=(held := []))
    known = {tensor.untyped_storage().data_ptr() for tensor in held}
    others = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in living()
        if id(tensor) not in before and tensor.dtype != torch.int16
    }
    left = sum(size for place, size in others.items() if place not in known)
    sizes = (4, 2) if half else (8, 8)
    setting = Setting(model, 50, 50, wide=sizes[0], narrow=sizes[1], recompute=True)
    found = saved_activations(setting, LONG) - _decoder_layer(setting, LONG)  # one at a time
    if half:  # and that layer's copy of what the encoder says
        found -= 2 * LONG.rows * LONG.source * model.d_model
    assert found <= autograds + left <= found + 64  # some single numbers


def living() -> list[Tensor]:
    return [item for item in gc.get_objects() if type(item) is Tensor]


def test_state_is_what_the_optimiser_holds(tmp_path: Any) -> None:
    """Weights, gradients, moments and the running mean, after a real update."""
    data = {"source": "a", "target": "b"}
    config = tiny_config(
        tmp_path,
        {"train": data, "valid": data},
        train={"ema": 0.9},
        model={"tie": "none", "norm": "pre", "positions": "learned", "max_positions": 64},
    )
    model = Transformer(config.model, 50, 60)
    updater = Updater(config, model, World(0, 1, torch.device("cpu")), str)
    ids = torch.randint(4, 50, (3, 7))
    updater.run([Batch(ids, ids, ids, [0, 1, 2], 21, 21)], 21, 1)
    found = training_memory(Setting(config.model, 50, 60, ema=True), BatchShape(3, 7, 7))
    parameters = list(model.parameters())
    assert size(parameters) == found.weights
    assert size([p.grad for p in parameters if p.grad is not None]) == found.gradients
    assert size(updater.state().tensors.values()) == found.moments + found.average
    assert found.total > found.weights + found.gradients + found.moments + found.average


def size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def test_sizes_by_hand() -> None:
    """Parameters of a layer, counted on paper: four projections and the feed-forward block with
    their biases, and the norms."""
    model = ModelConfig.model_validate({**SMALL, "tie": "all"})
    d, f = 16, 24
    attention, block, norm = 4 * (d * d + d), 2 * d * f + f + d, 2 * d
    encoder, decoder = attention + block + 2 * norm, 2 * attention + block + 3 * norm
    total = 2 * encoder + 3 * decoder + 50 * d
    assert Sizes.of(model, 50, 50)[:3] == (total, encoder, decoder)


def test_sharing_and_recomputing_take_less() -> None:
    """Eight processes hold an eighth each; a layer that is computed twice keeps its input."""
    model = ModelConfig(d_model=64, d_ff=256, encoder_layers=12, decoder_layers=12)
    shape = BatchShape(10, 30, 30)
    plain = training_memory(Setting(model, 500, 500), shape)
    shared = training_memory(Setting(model, 500, 500, shards=8), shape)
    assert shared.weights == -(-plain.weights // 8 // 4) * 4 and shared.copies > plain.copies
    twice = Setting(model, 500, 500, recompute=True)
    assert saved_activations(twice, shape) < plain.activations / 5


def test_gathered_layers_are_in_full_precision() -> None:
    """Under autocast the weights of a layer travel and lie as they are trained, in 4 bytes; the
    plan had 2. What is no layer is gathered for the whole pass; of layers, two."""
    model = ModelConfig.model_validate({**SMALL, "tie": "all"})
    total, encoder, decoder, _ = Sizes.of(model, 50, 50)
    plain, shared = (
        training_memory(Setting(model, 50, 50, narrow=2, shards=shards), SHORT).copies
        for shards in (1, 4)
    )
    gathered = total - 2 * encoder - 3 * decoder + 2 * decoder
    assert shared - plain == gathered * (4 + 4)


def test_a_sharded_model_is_whole_at_times() -> None:
    """Validations and checkpoints need the whole weights on the device: of many shares of a large
    model that is more than an update takes, and was left out."""
    model = ModelConfig(d_model=256, d_ff=1024, encoder_layers=6, decoder_layers=6)
    total = Sizes.of(model, 500, 500).total
    for shape in (BatchShape(1, 5, 5), BatchShape(500, 60, 60)):
        memory = training_memory(Setting(model, 500, 500, shards=1000, recompute=True), shape)
        update = memory.copies + memory.activations + memory.working
        assert memory.whole == 4 * total and (update > memory.whole) == (shape.rows > 1)
        state = memory.weights + memory.gradients + memory.moments
        assert memory.total == state + max(update, memory.whole)
        assert "; or whole weights" in memory.text()


def test_text() -> None:
    memory = Memory(10**9, 10**9, 2 * 10**9, 0, 0, 5 * 10**6, 10**6)
    assert memory.text() == (
        "4.0 GB: weights 1.0 GB, gradients 1.0 GB, moments 2.0 GB, activations 5 MB, working 1 MB"
    )
