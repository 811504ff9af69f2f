"""Decoding step by step against the modules on the whole prefix, for every kind of model."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from mttrain.config import ModelConfig
from mttrain.inference import ModelStepper, _int8_product, _weight_levels
from mttrain.model import Transformer

VOCAB = 23


def tiny(vocab: int = VOCAB, **settings: object) -> Transformer:
    values: dict[str, object] = {
        "d_model": 16, "d_ff": 32, "num_heads": 4, "encoder_layers": 2, "decoder_layers": 2,
        "dropout": 0.0, **settings,
    }  # fmt: skip
    torch.manual_seed(1)
    model = Transformer(ModelConfig(**values), vocab, vocab).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # zero at first: a bias left out would not show
                parameter.normal_(std=0.1)
    return model


def batch(lengths: list[int], vocab: int = VOCAB) -> Tensor:
    torch.manual_seed(sum(lengths))
    ids = torch.randint(4, vocab, (len(lengths), max(lengths)))
    for row, length in enumerate(lengths):
        ids[row, length:] = 0
    return ids


def follow(
    model: Transformer, src: Tensor, moves: list[tuple[list[int], list[int] | None]]
) -> None:
    """Reorder and step as told; each row must give what the modules give for its own prefix."""
    histories: list[list[int]] = [[] for _ in src]
    sentence = list(range(len(src)))
    stepper = ModelStepper(model)
    with torch.no_grad():
        state = stepper.start(src)
        for step, (rows, kept) in enumerate(moves):
            index = None if kept is None else torch.tensor(kept)
            state = stepper.reorder(state, torch.tensor(rows), index)
            sentence = [sentence[row] for row in rows]
            histories = [list(histories[row]) for row in rows]
            tokens = [4 + (7 * step + 3 * row) % (model.lm_head.out_features - 4) for row in rows]
            log_probs, state = stepper.step(torch.tensor(tokens), state)
            for history, token in zip(histories, tokens, strict=True):
                history.append(token)
            full = model.project(model(src[sentence], torch.tensor(histories))[:, -1])
            torch.testing.assert_close(log_probs, full.log_softmax(-1), rtol=1e-6, atol=1e-5)


def straight(rows: int, steps: int) -> list[tuple[list[int], list[int] | None]]:
    return [(list(range(rows)), None)] * steps


KINDS = [
    {"norm": norm, "activation": activation, "positions": positions, "tie": tie}
    for (norm, positions), (activation, tie) in itertools.product(
        itertools.product(("pre", "post"), ("sinusoidal", "learned")),
        (("relu", "all"), ("gelu", "target"), ("swiglu", "none")),
    )
]


def test_steps_without_the_usual_scales() -> None:
    """A step that scales embeddings or scores of a model that does not."""
    follow(tiny(scale_embedding=False, scale_attention=False), batch([5, 9, 2]), straight(3, 12))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind.values()))
def test_steps_equal_the_full_pass(kind: dict[str, str]) -> None:
    """M05, S13: position t of the t-th step; one query must see the whole cache, which grows."""
    extra = {"max_positions": 64} if kind["positions"] == "learned" else {}
    follow(tiny(**kind, **extra), batch([5, 9, 2]), straight(3, 40))


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_large_matrices(norm: str) -> None:
    """Those that are packed in another order, and a source beyond the fewest keys."""
    model = tiny(600, d_model=512, d_ff=512, encoder_layers=1, decoder_layers=1, norm=norm)
    follow(model, batch([30, 4], 600), straight(2, 3))


def test_long_sources() -> None:
    """Beyond the size up to which the products are explicit."""
    follow(tiny(), batch([150, 20]), straight(2, 3))


def test_unequal_depths_and_odd_sizes() -> None:
    model = tiny(d_model=20, num_heads=2, encoder_layers=1, decoder_layers=3)
    follow(model, batch([1, 3]), straight(2, 20))


def test_rows_keep_their_own_past() -> None:
    """S12: rows that widen, swap, leave the batch and part keep their own past and source, before
    and after the cache has grown."""
    moves: list[tuple[list[int], list[int] | None]] = [
        *straight(3, 2),
        ([0, 0, 1, 1, 2, 2], None),
        ([1, 0, 3, 2, 4, 4], None),
        ([2, 3, 5, 4], [1, 2]),
        ([0, 1, 1, 2, 3, 2], None),
    ]
    moves += [([1, 1, 0, 5, 3, 4], None), ([2, 0, 0, 4, 5, 3], None)] * 15
    moves += [([5, 3, 0], [1, 1, 0]), ([2, 0], [2, 0]), ([0, 0, 1, 1], None), ([2, 3], [1])]
    follow(tiny(), batch([5, 9, 2]), moves)


def test_learned_positions_end_with_a_clear_error() -> None:
    """M12: nothing is read beyond the last position."""
    stepper = ModelStepper(tiny(positions="learned", max_positions=4))
    tokens = torch.tensor([5])
    with torch.no_grad():
        state = stepper.start(batch([3]))
        for _ in range(4):
            _, state = stepper.step(tokens, state)
        with pytest.raises(ValueError, match="4 learned positions"):
            stepper.step(tokens, state)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 7, 200])
def test_int8_product(rows: int, bias: bool) -> None:
    """Against plain arithmetic on the same rounded numbers, rows of very different sizes and one of
    zeros among them; near the exact product."""
    torch.manual_seed(1)
    x, weight = torch.randn(rows, 512), torch.randn(600, 512) * torch.rand(600, 1)
    x *= 10.0 ** torch.randint(-3, 3, (rows, 1))
    x[-1] = 0.0
    added = torch.randn(600) if bias else None
    found = _int8_product(weight, added)(x)
    scale, scales = x.abs().amax(1, keepdim=True) / 127, weight.abs().amax(1) / _weight_levels()
    whole = (x / scale.clamp(min=1e-12)).round().double() @ (
        weight / scales[:, None]
    ).round().double().T
    wanted = whole * scale * scales + (0.0 if added is None else added)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)
    exact = x @ weight.T + (0.0 if added is None else added)
    size = x.norm(dim=1, keepdim=True) * weight.norm(dim=1)
    assert bool(((found - exact).abs() <= 0.02 * size + 1e-5).all())
