"""The short path of attention against the plain formula and the library's kernel."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mttrain import attention
from mttrain.attention import Attention, _ShortAttention
from mttrain.config import ModelConfig
from mttrain.dropout import DropoutKeys
from mttrain.masks import mask_bias


def settings(**changes: object) -> ModelConfig:
    return ModelConfig(d_model=24, num_heads=3, d_ff=8, **changes)  # type: ignore[arg-type]


def padding_bias(lengths: list[int], longest: int) -> Tensor:
    allowed = torch.arange(longest) < torch.tensor(lengths)[:, None]
    return mask_bias(allowed, torch.float32)[:, None, None, :]


def out_and_gradients(layer: Attention, x: Tensor, memory: Tensor | None, bias: Tensor | None):
    inputs = [x.clone().requires_grad_()]
    if memory is None:
        out = layer(inputs[0], bias, causal=bias is None)
    else:
        inputs.append(memory.clone().requires_grad_())
        out = layer.cross(*inputs, bias)
    weight = torch.linspace(-1, 1, out.numel()).view(out.shape)
    return out, torch.autograd.grad((out * weight).sum(), [*inputs, *layer.parameters()])


def assert_both_paths_agree(
    monkeypatch: pytest.MonkeyPatch,
    layer: Attention,
    x: Tensor,
    memory: Tensor | None,
    bias: Tensor | None,
) -> None:
    """Results and gradients of the short path, then of the other one."""
    short = out_and_gradients(layer, x, memory, bias)
    monkeypatch.setattr(attention, "SHORT", 0)
    other = out_and_gradients(layer, x, memory, bias)
    torch.testing.assert_close(short[0], other[0], rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(short[1], other[1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [1, 2, 7, 15, 16, 17, 40])
@pytest.mark.parametrize("kind", ["padded", "causal", "cross"])
def test_short_path_gives_the_result_and_the_gradients_of_the_library(
    monkeypatch: pytest.MonkeyPatch, length: int, kind: str
) -> None:
    """Keys are filled up to 16 on the way; neither they nor padded ones may be attended to."""
    torch.manual_seed(length)
    layer = Attention(settings(), DropoutKeys())
    x, memory, bias = torch.randn(5, length, 24), None, None
    if kind != "causal":
        sources = max(1, length - 3) if kind == "cross" else length
        bias = padding_bias([max(1, sources - i) for i in range(5)], sources)
        memory = torch.randn(5, sources, 24) if kind == "cross" else None
    assert_both_paths_agree(monkeypatch, layer, x, memory, bias)


def test_gradients_of_the_short_path_are_those_of_finite_differences() -> None:
    torch.manual_seed(1)
    query, pair = (
        torch.randn(2, 3, width, dtype=torch.float64, requires_grad=True) for width in (4, 8)
    )
    joined = torch.randn(2, 3, 12, dtype=torch.float64, requires_grad=True)
    drop = (0.4, 11)
    assert torch.autograd.gradcheck(
        lambda q, kv: _ShortAttention.apply(q, kv, None, (2, 0.5), drop), (query, pair)
    )
    assert torch.autograd.gradcheck(
        lambda qkv: _ShortAttention.apply(qkv, None, None, (2, 0.5), None), joined
    )


def test_attention_dropout_is_the_same_on_both_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """One mask for one key, applied to the weights, whatever computes them."""
    keys = DropoutKeys()
    layer = Attention(settings(attention_dropout=0.5), keys)
    keys.set(1, 2, 3)
    x = torch.randn(4, 20, 24)
    assert_both_paths_agree(monkeypatch, layer, x, None, None)


def test_long_sequences_and_other_types_take_the_kernel_of_the_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []
    kernel = F.scaled_dot_product_attention

    def counted(*args: object, **kwargs: object) -> Tensor:
        calls.append(1)
        return kernel(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    layer = Attention(settings(), DropoutKeys())
    layer(torch.randn(1, attention.SHORT, 24), None, causal=True)
    assert not calls
    layer(torch.randn(1, attention.SHORT + 1, 24), None, causal=True)
    layer.bfloat16()(torch.randn(1, 5, 24, dtype=torch.bfloat16), None, causal=True)
    assert len(calls) == 2
