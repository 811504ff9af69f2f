"""Linear layers of training against PyTorch's own, with both libraries behind them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mttrain import linear as module
from mttrain.linear import linear, product


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
