"""Layers that are computed again in backward, and compiled ones, against the layers as written."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mttrain.compiling import Compiler, check_compiler, padded, prepare_layers
from mttrain.config import ModelConfig
from mttrain.distributed import World
from mttrain.errors import ConfigError
from mttrain.linear import HAS_ONEDNN, bfloat16_products
from mttrain.model import Transformer
from mttrain.parallel import parallel

CPU = torch.device("cpu")
VOCAB = 30
DROPS = {"dropout": 0.2, "attention_dropout": 0.1, "activation_dropout": 0.1}


def new_model(layers: int = 2) -> Transformer:
    torch.manual_seed(1)
    config = ModelConfig(
        d_model=16,
        d_ff=32,
        num_heads=2,
        encoder_layers=layers,
        decoder_layers=layers,
        norm="pre",
        **DROPS,
    )  # type: ignore[call-arg]
    return Transformer(config, VOCAB, VOCAB)


def batch(rows: int, source: int, target: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    sides = (torch.randint(4, VOCAB, (rows, length)) for length in (source, target))
    first, second = (padded(side, 0) for side in sides)
    return first, second


def gradients(
    model: Transformer,
    inputs: tuple[Tensor, Tensor],
    context: Callable[[], object] = nullcontext,
    rows: int | None = None,
) -> tuple[Tensor, dict[str, Tensor], int]:
    """Output of the first rows and its gradients, and how many numbers were kept for backward.

    In rows of padding nothing may be attended to: what comes out is of no use, and not one thing.
    """
    kept = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel()
        return tensor

    model.zero_grad()
    model.dropout_keys.set(1, 2, 3)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        with context():  # type: ignore[attr-defined]
            out = model(*inputs)[:rows]
        loss = out.float().pow(2).sum()
    loss.backward()
    return out, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}, kept


@pytest.mark.parametrize("context", [nullcontext, bfloat16_products])
def test_computed_again_is_the_same_to_the_bit(context: Callable[[], object]) -> None:
    """Other dropout masks, or other products, in the second pass give gradients of another
    function: bfloat16 was on in the first pass only."""
    if context is not nullcontext and not HAS_ONEDNN:
        pytest.skip("no bfloat16 products without oneDNN")
    plain, again = new_model(), new_model()
    prepare_layers(again, CPU, None, recompute=True)
    inputs = batch(5, 6, 7)
    (out, wanted, much), (found_out, found, little) = (
        gradients(model, inputs, context) for model in (plain, again)
    )
    assert torch.equal(out, found_out)
    assert wanted.keys() == found.keys()
    assert all(torch.equal(value, found[name]) for name, value in wanted.items())
    assert little < much / 4, "nothing was saved"


def test_padding_rounds_up_and_keeps_what_is_there() -> None:
    ids = torch.arange(1, 16).view(5, 3)
    out = padded(ids, 0)
    assert out.shape == (8, 8) and torch.equal(out[:5, :3], ids)
    assert int(out.sum()) == int(ids.sum())
    assert padded(out, 0).shape == out.shape


def test_without_a_compiler_it_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    """torch.compile on a machine without a compiler ends in pages of traceback."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match=r"train\.compile.*no C\+\+ compiler.*false"):
        check_compiler(CPU)


@pytest.mark.filterwarnings("default")  # PyTorch's tracing looks at gradients that are none
@pytest.mark.parametrize(
    ("backend", "recompute"),
    [
        ("eager", True),
        pytest.param("aot_eager", False, marks=pytest.mark.slow),
        pytest.param("aot_eager", True, marks=pytest.mark.slow),
        pytest.param("inductor", False, marks=pytest.mark.slow),
        pytest.param("inductor", True, marks=pytest.mark.slow),
    ],
)
def test_compiled_layers_compute_the_same_and_are_few(backend: str, recompute: bool) -> None:
    """The same masks and, up to rounding, the same gradients; sizes do not multiply the code: one
    piece for the encoder's layers and one for the decoder's, however many there are. Around the
    compiled code, computing again met other code than before. eager and aot_eager make the same
    graphs and interpret them."""
    if backend == "inductor" and shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    torch._dynamo.reset()
    plain = new_model()
    model, compiler = copy.deepcopy(plain), Compiler(backend)
    prepare_layers(model, CPU, compiler, recompute)
    # Below 16 positions the layers as written draw the masks of attention weights for 16.
    for rows, source, target in ((15, 12, 14), (9, 17, 12), (1, 9, 9), (40, 33, 40)):
        inputs = batch(rows, source, target)
        wanted, theirs, _ = gradients(plain, inputs, rows=rows)
        found, ours, _ = gradients(model, inputs, rows=rows)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-4)
    assert 2 <= compiler.graphs <= 6
    model.eval()
    before = compiler.graphs
    with torch.no_grad():
        assert torch.equal(model(*batch(3, 9, 9)), plain.eval()(*batch(3, 9, 9)))
    assert compiler.graphs == before, "validation is not compiled"


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_several_processes_compile_as_few_pieces(kind: str) -> None:
    """Under DistributedDataParallel PyTorch cut each layer at its buckets: twice the pieces. The
    layers are as large as the first bucket; sharded ones are gathered outside of the code."""
    torch._dynamo.reset()
    config = ModelConfig(
        d_model=256, d_ff=1024, num_heads=2, encoder_layers=1, decoder_layers=1, dropout=0.0
    )
    plain = Transformer(config, VOCAB, VOCAB)
    inputs, compiler = batch(9, 17, 12), Compiler("eager")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        spread = parallel(kind, copy.deepcopy(plain), World(0, 2, CPU), lambda model: model)
        prepare_layers(spread.trained, CPU, compiler, recompute=False)
        found = spread.step(*inputs)[:9]
        found.sum().backward()
        wanted = plain(*inputs)[:9]
        wanted.sum().backward()
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        for name, parameter in spread.trained.named_parameters():
            ours, theirs = spread.whole(parameter.grad), plain.get_parameter(name).grad
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    finally:
        dist.destroy_process_group()
    assert compiler.graphs == 2
