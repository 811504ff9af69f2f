"""Linear layers of training against PyTorch's own, with both libraries behind them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mttrain import linear as module
from mttrain.config import ModelConfig
from mttrain.linear import bfloat16_products, linear, product, weight_gradient
from mttrain.model import Transformer


@pytest.fixture(params=["onednn", "other"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both paths on any processor."""
    if request.param == "onednn" and not module.HAS_ONEDNN:
        pytest.skip("this build of PyTorch has no oneDNN")
    monkeypatch.setattr(module, "_has_wide_vectors", lambda: request.param == "onednn")
    return str(request.param)


def tensors(*shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    *rows, width, out = shape
    sizes = ((*rows, width), (out, width), (out,))
    made = [torch.randn(size, generator=generator).to(dtype) for size in sizes]
    return [tensor.requires_grad_() for tensor in made]


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("shape", [(7, 5, 3), (2, 33, 24, 40), (1, 1, 8, 8), (3, 5, 1, 2)], ids=str)
def test_equals_the_plain_layer(shape: tuple[int, ...], relu: bool, library: str) -> None:
    """Values and all three gradients, with what follows reading a part of the output only."""
    own, plain = tensors(*shape), tensors(*shape)
    out = linear(*own, relu=relu)
    wanted = F.linear(*plain)
    if relu:
        wanted = F.relu(wanted)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
    if library == "onednn":
        assert "_Linear" in str(out.grad_fn.next_functions[0][0])  # type: ignore[union-attr]
    for result in (out, wanted):
        (result[..., :-1].square().sum() + 0.5 * result.sum()).backward()
    for one, other in zip(own, plain, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_inputs_that_lie_otherwise(library: str) -> None:
    """A transposed input and a gradient that is one number repeated are read as they lie."""
    x, weight, bias = tensors(6, 4, 5)
    turned = x.detach().t().contiguous().t().requires_grad_()
    linear(turned, weight, bias).sum().backward()
    torch.testing.assert_close(turned.grad, weight.detach().sum(0).expand(6, 4))
    wide = torch.randn(6, 9)[:, 2:6]
    torch.testing.assert_close(product(wide, weight.detach()), wide @ weight.detach().t())
    back = product(torch.ones(6, 5), weight.detach().t())
    torch.testing.assert_close(back, weight.detach().sum(0).expand(6, 4))


def test_other_types_take_the_plain_way(library: str) -> None:
    """float64 stays exact, and autocast decides the type of the product."""
    x, weight, bias = tensors(4, 6, 3, dtype=torch.float64)
    assert torch.autograd.gradcheck(linear, (x, weight, bias))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(*tensors(4, 6, 3)).dtype == torch.bfloat16


@pytest.mark.parametrize("rows", [1, 16, 17, 255, 300, 1000, 2049, 4095, 4096, 4097])
def test_rows_are_rounded_to_few_numbers(rows: int) -> None:
    """A kernel for each number of rows took the memory of a training run from 0.9 to 1.7 GB."""
    wanted = module._rounded(rows)
    assert rows <= wanted <= rows * 5 / 4 + 1
    low = 1 << (rows.bit_length() - 1)
    assert len({module._rounded(n) for n in range(low + 1, 2 * low + 1)}) <= 4


def test_room_is_used_and_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies behind the last row may be anything: it must not reach a result or a gradient."""
    if not module.HAS_ONEDNN:
        pytest.skip("this build of PyTorch has no oneDNN")
    monkeypatch.setattr(module, "_has_wide_vectors", lambda: True)
    x, weight, bias = tensors(5, 60, 24, 40)
    with torch.no_grad():
        room = module.roomy(x, 5, 60, 24)
        room.untyped_storage().fill_(0xFF)  # NaN everywhere
        room.copy_(x)
    assert module._whole(room.view(300, 24)) is not None
    assert module._whole(x.detach().view(300, 24)) is None  # as large as its rows
    out = linear(room.requires_grad_(), weight, bias, relu=True)
    assert module._whole(out.detach().view(300, 40)) is not None
    out.square().sum().backward()
    wanted = F.relu(F.linear(x, weight, bias))
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad(wanted.square().sum(), (x, weight, bias))
    for one, other in zip((room.grad, weight.grad, bias.grad), grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)


def test_inputs_with_room_in_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """An input that lost its room would be multiplied by the slower library, and nobody told."""
    if not module.HAS_ONEDNN:
        pytest.skip("this build of PyTorch has no oneDNN")
    monkeypatch.setattr(module, "_has_wide_vectors", lambda: True)
    found: list[bool] = []
    plain = module._whole

    def watched(x: Tensor) -> Tensor | None:
        whole = plain(x)
        found.append(whole is not None)
        return whole

    monkeypatch.setattr(module, "_whole", watched)
    for norm in ("pre", "post"):
        config = ModelConfig(
            d_model=32, d_ff=48, num_heads=2, encoder_layers=1, decoder_layers=1, norm=norm
        )
        model = Transformer(config, 50, 50)
        model.dropout_keys.set(1, 1, 0)
        source, target = torch.randint(4, 50, (40, 11)), torch.randint(4, 50, (40, 12))
        found.clear()
        model(source, target).sum().backward()
        # Forward and backward of qkv, out, fc1, fc2, and of q, kv, out of cross-attention.
        assert found == [True] * 2 * (4 + 4 + 3)


def as_half(*tensors: Tensor) -> list[Tensor]:
    """Rounded to bfloat16, in float64."""
    return [t.detach().bfloat16().double() for t in tensors]


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("shape", [(3, 5, 4), (2, 33, 24, 40), (300, 128, 64)], ids=str)
def test_bfloat16_products(shape: tuple[int, ...], relu: bool) -> None:
    """Operands are rounded and results but once: the oracle multiplies rounded operands exactly."""
    x, weight, bias = tensors(*shape)
    with bfloat16_products():
        out = linear(x, weight, bias, relu=relu)
    low = [t.requires_grad_() for t in as_half(x, weight, bias)]
    wanted = F.linear(*low)
    wanted = F.relu(wanted) if relu else wanted
    assert out.dtype == torch.float32
    close = {"rtol": 2**-7, "atol": 2e-3 * shape[-2] ** 0.5, "check_dtype": False}
    torch.testing.assert_close(out, wanted, **close)  # type: ignore[arg-type]
    # Whole numbers of few digits are exact in bfloat16, so only sums and results are rounded.
    generator = torch.Generator().manual_seed(1)
    grad = torch.randint(-8, 9, out.shape, generator=generator).float()
    grad *= out.detach() != 0  # near 0 the two may differ in what is positive
    out.backward(grad)
    wanted.backward(grad.double())
    for one, other in zip((x, weight, bias), low, strict=True):
        assert one.grad is not None and one.grad.dtype == torch.float32
        scale = other.grad.abs().max().item()  # type: ignore[union-attr]
        torch.testing.assert_close(
            one.grad, other.grad, rtol=2**-7, atol=2**-8 * scale, check_dtype=False
        )


def test_bfloat16_ends_with_the_block() -> None:
    """Outside of it, in other types, and after an error in it, nothing is rounded."""
    x, weight, bias = tensors(9, 6, 3)
    wanted = linear(x, weight, bias)
    with pytest.raises(ZeroDivisionError), bfloat16_products():
        assert not torch.equal(linear(x, weight, bias), wanted)
        double = [t.detach().double() for t in (x, weight, bias)]
        assert torch.equal(linear(*double), F.linear(*double))
        raise ZeroDivisionError
    assert torch.equal(linear(x, weight, bias), wanted)


@pytest.mark.parametrize("rows", [1, 33, 96, 209, 1000])
def test_rows_added_in_bfloat16_count_for_nothing(rows: int) -> None:
    """The kernels are made for few numbers of rows; the gradient of a weight sums over them."""
    generator = torch.Generator().manual_seed(rows)
    grad, x = (torch.randint(-3, 4, (rows, n), generator=generator).bfloat16() for n in (5, 8))
    for _ in range(3):  # memory with other numbers in it
        torch.full((2 * rows, 8), torch.nan, dtype=torch.bfloat16)
    total = torch.ones(5, 8)
    weight_gradient(grad, x, total)
    wanted = grad.double().t() @ x.double()
    torch.testing.assert_close(total.double() - 1, wanted, rtol=2**-8, atol=0)
    out = product(x, torch.eye(8, dtype=torch.bfloat16))
    assert torch.equal(out, x)
