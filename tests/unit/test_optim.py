"""Schedules as arithmetic, parameter groups, clipping."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from mttrain.config import ModelConfig, OptimConfig
from mttrain.model import Transformer
from mttrain.optim import (
    WeightAverage,
    build_optimizer,
    clip_gradients,
    gradient_norm,
    learning_rate,
    parameter_groups,
    step_if_finite,
)


def rates(config: OptimConfig, updates: int, max_steps: int | None = None) -> list[float]:
    return [learning_rate(u, config, max_steps) for u in range(1, updates + 1)]


@pytest.mark.parametrize("schedule", ["inverse_sqrt", "cosine", "linear", "constant"])
@pytest.mark.parametrize("warmup", [0, 1, 10])
def test_first_update_moves_and_warm_up_ends_at_the_peak(schedule: str, warmup: int) -> None:
    """R04: a schedule that starts at 0 wastes the first update; warm-up 0 means full rate."""
    config = OptimConfig(lr=2.0, schedule=schedule, warmup_steps=warmup)
    values = rates(config, 40, max_steps=40)
    assert all(value > 0 for value in values)
    assert values[max(warmup, 1) - 1] == pytest.approx(2.0, rel=0.03)
    if warmup:
        assert values[: warmup - 1] == pytest.approx([2.0 * u / warmup for u in range(1, warmup)])


def test_inverse_sqrt_is_the_papers() -> None:
    """Vaswani et al. 2017, equation 3, with the peak as the free scale."""
    d_model, warmup = 512, 4000
    config = OptimConfig(lr=d_model**-0.5 * warmup**-0.5, warmup_steps=warmup)
    for update in (1, 100, 3999, 4000, 4001, 100_000):
        paper = d_model**-0.5 * min(update**-0.5, update * warmup**-1.5)
        assert learning_rate(update, config, None) == pytest.approx(paper)


def test_linear_and_cosine_end_at_the_floor() -> None:
    """The rate falls all the way, and the update after the last would be min_lr."""
    for schedule in ("linear", "cosine"):
        config = OptimConfig(lr=1.0, min_lr=0.1, schedule=schedule, warmup_steps=5)
        values = rates(config, 101, max_steps=100)
        assert values[100] == pytest.approx(0.1)
        assert all(a > b for a, b in itertools.pairwise(values[5:]))
    linear = OptimConfig(lr=1.0, schedule="linear", warmup_steps=0)
    assert learning_rate(51, linear, 101) == pytest.approx(0.5)
    cosine = OptimConfig(lr=1.0, schedule="cosine", warmup_steps=0)
    halfway = 0.5 * (1 + math.cos(math.pi * 50 / 101))
    assert learning_rate(50, cosine, 100) == pytest.approx(halfway)


def tiny(tie: str = "all") -> Transformer:
    return Transformer(
        ModelConfig(d_model=8, d_ff=16, num_heads=2, encoder_layers=1, decoder_layers=1, tie=tie),
        20,
        20,
    )


@pytest.mark.parametrize("tie", ["all", "target", "none"])
def test_each_tensor_is_in_one_group_and_only_matrices_decay(tie: str) -> None:
    """A tied tensor listed twice is updated twice; decayed norms and biases are a known slip."""
    model = tiny(tie)
    decay, keep = parameter_groups(model, 0.01)
    ids = [id(p) for group in (decay, keep) for p in group["params"]]
    assert len(ids) == len(set(ids)) == len(list(model.parameters()))
    assert decay["weight_decay"] == 0.01 and keep["weight_decay"] == 0.0
    assert all(p.dim() == 2 for p in decay["params"])
    kept = {id(p) for p in keep["params"]}
    assert id(model.encoder.embed_tokens.weight) in kept
    assert id(model.encoder.layers[0].fc1.bias) in kept


def test_weight_decay_is_decoupled() -> None:
    """Without a gradient in the way, one update shrinks a matrix by lr x decay and nothing else."""
    model = tiny()
    optimizer = build_optimizer(model, OptimConfig(lr=0.1, weight_decay=0.5))
    matrix, norm = model.encoder.layers[0].fc1.weight, model.encoder.layers[0].final_layer_norm
    before, bias = matrix.detach().clone(), norm.weight.detach().clone()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(matrix.detach(), before * (1 - 0.1 * 0.5))
    assert torch.equal(norm.weight.detach(), bias)


def test_clipping_scales_to_the_limit() -> None:
    """The norm is over all tensors together, and small gradients stay as they are."""
    a, b = torch.zeros(3, requires_grad=True), torch.zeros(4, requires_grad=True)
    a.grad, b.grad = torch.full((3,), 2.0), torch.full((4,), -1.0)
    norm = gradient_norm([a, b])
    assert norm.item() == pytest.approx(4.0)
    clip_gradients([a, b], norm, 8.0)
    assert a.grad[0].item() == 2.0
    clip_gradients([a, b], norm, 1.0)
    assert gradient_norm([a, b]).item() == pytest.approx(1.0, rel=1e-5)
    b.grad[0] = float("nan")
    assert not math.isfinite(gradient_norm([a, b]).item())


def test_running_mean_is_the_recursion() -> None:
    """A mean whose bias towards the first weights never ends, or that follows its own copy: each
    number against the recursion in plain Python."""
    weight = torch.nn.Parameter(torch.tensor([3.0, -1.0]))
    mean = WeightAverage({"w": weight}, decay=0.6)
    wanted = [3.0, -1.0]
    for update in range(1, 30):
        with torch.no_grad():
            weight.add_(torch.tensor([0.25 * update, -0.5]))
        mean.add(update)
        decay = min(0.6, (1 + update) / (10 + update))
        pairs = zip(wanted, weight.tolist(), strict=True)
        wanted = [decay * old + (1 - decay) * new for old, new in pairs]
        assert mean.weights["w"].tolist() == pytest.approx(wanted, rel=1e-5)
    assert not mean.weights["w"].requires_grad


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_step_that_is_left_out_on_the_device_leaves_nothing_behind(bad: float) -> None:
    """Weights, moments and counters are those of a run that never saw the bad gradient."""
    results = []
    for gradients in ([0.5, bad, -0.25], [0.5, -0.25]):
        weight = torch.nn.Linear(3, 2)
        torch.nn.init.ones_(weight.weight)
        torch.nn.init.ones_(weight.bias)
        optimizer = build_optimizer(weight, OptimConfig())
        for value in gradients:
            for parameter in weight.parameters():
                parameter.grad = torch.full_like(parameter, value)
            norm = gradient_norm(weight.parameters())
            clip_gradients(weight.parameters(), norm, 0.1)
            step_if_finite(optimizer, norm)
        state = [value for p in weight.parameters() for value in optimizer.state[p].values()]
        results.append([*weight.parameters(), *state])
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)
