"""AdamW, its parameter groups, learning rates as pure functions of the update, running means.

There is no scheduler object with a state of its own: the rate of update u is `learning_rate(u,
...)` on every run, so a resumed run cannot restart its warm-up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from mttrain.config import OptimConfig


def learning_rate(update: int, config: OptimConfig, max_steps: int | None) -> float:
    """Rate of the given update, counted from 1.

    Linear warm-up reaches `lr` at update `warmup_steps` (none: full rate at once). After it:
    inverse_sqrt  lr * sqrt(warmup / update)        (Vaswani et al. 2017, equation 3, peak = lr)
    linear        from lr to min_lr at max_steps
    cosine        from lr to min_lr at max_steps, half a cosine (Loshchilov & Hutter 2017)
    constant      lr
    """
    if update < 1:
        raise ValueError("updates are counted from 1")
    warmup = config.warmup_steps
    if update < warmup:
        return config.lr * update / warmup
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "inverse_sqrt":
        return max(config.min_lr, config.lr * math.sqrt(max(warmup, 1) / update))
    assert max_steps is not None  # held by the configuration's own checks
    # The last update still moves: the rate would be min_lr only one update after it.
    done = min(1.0, (update - warmup) / max(1, max_steps + 1 - warmup))
    left = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.min_lr + (config.lr - config.min_lr) * left


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Matrices of linear layers decay; biases, norms and embeddings do not.

    Each tensor appears once, however many names it has.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    decay: list[Tensor] = []
    keep: list[Tensor] = []
    for parameter in model.parameters():
        matrix = parameter.dim() > 1 and id(parameter) not in embeddings
        (decay if matrix else keep).append(parameter)
    groups = [(decay, weight_decay), (keep, 0.0)]
    return [{"params": list(p), "weight_decay": w} for p, w in groups if p]


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019), fused where PyTorch has a fused kernel for the device."""
    device = next(model.parameters()).device.type
    return torch.optim.AdamW(
        parameter_groups(model, config.weight_decay),
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=device in ("cpu", "cuda"),
    )


def reserve_memory(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter its gradient and its moments, all zero, before the first update.

    Allocated later, between the tensors of a step, they leave holes in the memory of a CPU process
    that grow it by a quarter.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use `rate` in the next update."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Euclidean norm of all gradients together, 0-dimensional; not finite when one is not."""
    grads = [p.grad for p in parameters if p.grad is not None]
    return torch.nn.utils.get_total_norm(grads)


def clip_gradients(parameters: Iterable[Tensor], norm: Tensor, limit: float) -> None:
    """Scale all gradients by limit / norm when the norm is larger (Pascanu et al. 2013)."""
    kept = [p for p in parameters if p.grad is not None]
    torch.nn.utils.clip_grads_with_norm_(kept, limit, norm)


def step_if_finite(optimizer: torch.optim.AdamW, norm: Tensor) -> None:
    """A step of fused AdamW that its kernels leave out, moments and counters too, when the norm of
    the gradient is not finite: decided on the device, which nobody waits for.

    The flag is the one by which a GradScaler tells fused optimisers of an overflow.
    """
    flag = (~norm.isfinite()).to(torch.float32)
    optimizer.found_inf = flag  # type: ignore[attr-defined]
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]


class WeightAverage:
    """Exponential moving average of the weights after each update, also one that was left out.

    Mean of update u: m + (1 - d) * (w - m), with d = min(decay, (1 + u) / (10 + u)), so that the
    first weights are soon forgotten (the schedule of TensorFlow's ExponentialMovingAverage; for
    what it is good, see Polyak & Juditsky 1992 and Morales-Brotons et al. 2024). Price: a copy of
    the weights, and one pass over both for each update.
    """

    def __init__(self, parameters: Mapping[str, Tensor], decay: float) -> None:
        """parameters: by name, as they are trained; the mean begins as what they are now."""
        self.decay = decay
        self.weights = {name: value.detach().clone() for name, value in parameters.items()}
        self._trained = [value.detach() for value in parameters.values()]  # the same memory

    def add(self, update: int) -> None:
        """Take the weights as they are after `update` (from 1) into the mean."""
        decay = min(self.decay, (1.0 + update) / (10.0 + update))
        torch._foreach_lerp_(list(self.weights.values()), self._trained, 1.0 - decay)
