"""Encoder and decoder layers against torch.nn.Transformer's: outputs and gradients, both orders."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mttrain.config import ModelConfig
from mttrain.dropout import DropoutKeys
from mttrain.masks import mask_bias
from mttrain.model import Attention, DecoderLayer, EncoderLayer

D_MODEL, HEADS, D_FF = 24, 4, 40


def settings(norm: str, activation: str) -> ModelConfig:
    return ModelConfig(
        d_model=D_MODEL, num_heads=HEADS, d_ff=D_FF, norm=norm, activation=activation, dropout=0.0
    )


def copy_attention(ours: Attention, theirs: nn.MultiheadAttention) -> None:
    with torch.no_grad():
        theirs.in_proj_weight.copy_(
            torch.cat([ours.q_proj.weight, ours.k_proj.weight, ours.v_proj.weight])
        )
        theirs.in_proj_bias.copy_(torch.cat([ours.q_proj.bias, ours.k_proj.bias, ours.v_proj.bias]))
        theirs.out_proj.weight.copy_(ours.out_proj.weight)
        theirs.out_proj.bias.copy_(ours.out_proj.bias)


def pairs_of_modules(ours: nn.Module, theirs: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    pairs = [(ours.fc1, theirs.linear1), (ours.fc2, theirs.linear2)]
    pairs.append((ours.self_attn_layer_norm, theirs.norm1))
    if isinstance(ours, DecoderLayer):
        pairs += [(ours.encoder_attn_layer_norm, theirs.norm2)]
        pairs += [(ours.final_layer_norm, theirs.norm3)]
    else:
        pairs += [(ours.final_layer_norm, theirs.norm2)]
    return pairs


def randomise(module: nn.Module) -> None:
    """Norms start at 1 and 0 and biases at 0: values that would hide a swapped parameter."""
    torch.manual_seed(11)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)


def compare_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    for mine, other in pairs_of_modules(ours, theirs):
        torch.testing.assert_close(mine.weight.grad, other.weight.grad, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(mine.bias.grad, other.bias.grad, rtol=1e-5, atol=1e-5)
    query = theirs.self_attn.in_proj_weight.grad[:D_MODEL]
    torch.testing.assert_close(ours.self_attn.q_proj.weight.grad, query, rtol=1e-5, atol=1e-5)


def padded(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """States [B, L, D] and a mask [B, L], True at real positions; every row has one at least."""
    lengths = torch.arange(length, length - batch, -1).clamp(min=1)
    mask = torch.arange(length)[None, :] < lengths[:, None]
    return torch.randn(batch, length, D_MODEL), mask


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_encoder_layer(norm: str, activation: str) -> None:
    """Norm order, residuals, masks (M04: True means may attend here, the opposite there)."""
    ours = EncoderLayer(settings(norm, activation), DropoutKeys())
    randomise(ours)
    theirs = nn.TransformerEncoderLayer(
        D_MODEL, HEADS, D_FF, 0.0, activation, batch_first=True, norm_first=norm == "pre"
    )
    copy_attention(ours.self_attn, theirs.self_attn)
    for mine, other in pairs_of_modules(ours, theirs):
        other.load_state_dict(mine.state_dict())
    x, mask = padded(4, 7)
    mine = ours(x, mask_bias(mask, x.dtype)[:, None, None, :])
    other = theirs(x, src_key_padding_mask=~mask)
    torch.testing.assert_close(mine[mask], other[mask], rtol=1e-5, atol=1e-5)
    target = torch.randn_like(x)
    (mine * target)[mask].sum().backward()
    (other * target)[mask].sum().backward()
    compare_gradients(ours, theirs)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_decoder_layer(norm: str, activation: str) -> None:
    """Causal self-attention and padded cross-attention (a missing mask there is a classic)."""
    ours = DecoderLayer(settings(norm, activation), DropoutKeys())
    randomise(ours)
    theirs = nn.TransformerDecoderLayer(
        D_MODEL, HEADS, D_FF, 0.0, activation, batch_first=True, norm_first=norm == "pre"
    )
    copy_attention(ours.self_attn, theirs.self_attn)
    copy_attention(ours.encoder_attn, theirs.multihead_attn)
    for mine, other in pairs_of_modules(ours, theirs):
        other.load_state_dict(mine.state_dict())
    x, _ = padded(4, 6)
    memory, mask = padded(4, 9)
    causal = torch.ones(6, 6, dtype=torch.bool).triu(1)
    mine = ours(x, memory, mask_bias(mask, x.dtype)[:, None, None, :])
    other = theirs(x, memory, tgt_mask=causal, memory_key_padding_mask=~mask)
    torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
    target = torch.randn_like(x)
    (mine * target).sum().backward()
    (other * target).sum().backward()
    compare_gradients(ours, theirs)
    keys = theirs.multihead_attn.in_proj_weight.grad[D_MODEL : 2 * D_MODEL]
    torch.testing.assert_close(ours.encoder_attn.k_proj.weight.grad, keys, rtol=1e-5, atol=1e-5)


def test_explicit_attention_equals_the_fused_one() -> None:
    """The path that attention dropout takes must compute the same attention."""
    attention = Attention(settings("post", "relu"), DropoutKeys())
    torch.manual_seed(3)
    query, key, value = (torch.randn(2, HEADS, 5, D_MODEL // HEADS) for _ in range(3))
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)
    bias = mask_bias(mask, query.dtype)[:, None, None, :]
    fused = torch.nn.functional.scaled_dot_product_attention(query, key, value, bias)
    explicit = torch.matmul(attention.weights(query, key, bias, causal=False), value)
    torch.testing.assert_close(explicit, fused)
    fused = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    explicit = torch.matmul(attention.weights(query, key, None, causal=True), value)
    torch.testing.assert_close(explicit, fused)
