"""The Transformer as a whole: masks, positions, embeddings, numerics."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from mttrain.config import ModelConfig
from mttrain.loss import smoothed_loss
from mttrain.model import Transformer, sinusoidal_positions

VOCAB = 23


def tiny(**settings: object) -> Transformer:
    values: dict[str, object] = {
        "d_model": 16, "d_ff": 32, "num_heads": 4, "encoder_layers": 2, "decoder_layers": 2,
        "dropout": 0.0, **settings,
    }  # fmt: skip
    torch.manual_seed(1)
    return Transformer(ModelConfig(**values), VOCAB, VOCAB).eval()


def batch(lengths: list[int], width: int | None = None) -> torch.Tensor:
    torch.manual_seed(sum(lengths))
    ids = torch.randint(4, VOCAB, (len(lengths), width or max(lengths)))
    for row, length in enumerate(lengths):
        ids[row, length:] = 0
    return ids


# --- positions --------------------------------------------------------------------------------


@pytest.mark.parametrize("d_model", [4, 16, 512])
def test_positions_are_the_papers_formula(d_model: int) -> None:
    """A tutorial divides by the negative-exponent term, which inverts the frequencies."""
    table = sinusoidal_positions(0, 300, d_model)
    for pos, i in itertools.product((0, 1, 7, 299), range(d_model // 2)):
        angle = pos / 10000 ** (2 * i / d_model)
        assert table[pos, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-6)
        assert table[pos, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)


def test_low_columns_have_the_short_wavelengths() -> None:
    """Column 0 turns once in 2*pi positions, the last columns barely move."""
    table = sinusoidal_positions(0, 64, 64)
    moves = (table[1:] - table[:-1]).abs().mean(0)
    assert moves[0] > 0.5 and moves[-1] < 1e-3
    assert bool((moves[0::2].diff() < 0).all())


def test_what_depends_on_the_distance_alone() -> None:
    """The dot product does; the difference of two vectors does not; PE(p+k) is linear in PE(p)."""
    table = sinusoidal_positions(0, 200, 32).double()
    assert torch.allclose(table[3] @ table[8], table[100] @ table[105], atol=1e-4)
    assert not torch.allclose(table[8] - table[3], table[105] - table[100], atol=1e-2)
    shift = torch.linalg.lstsq(table[:150], table[7:157]).solution
    torch.testing.assert_close(table[20:190] @ shift, table[27:197], rtol=0, atol=1e-3)


@pytest.mark.parametrize("d_model", [1, 5, 15])
def test_odd_widths_work(d_model: int) -> None:
    """M11: sine and cosine halves of different widths must not break the construction."""
    table = sinusoidal_positions(0, 20, d_model)
    assert table.shape == (20, d_model)
    torch.testing.assert_close(
        table[:, -1], torch.sin(torch.arange(20) / 10000 ** ((d_model - 1) / d_model))
    )
    model = tiny(d_model=15, num_heads=3, positions="learned", max_positions=9)
    assert model(batch([3, 5]), batch([4, 2])).isfinite().all()


def test_beyond_the_prepared_table() -> None:
    """M12: a position past the table must be computed, never read from a wrong row."""
    model = tiny()
    model.encoder.positions(0, 10)
    late = model.encoder.positions(5000, 3)
    torch.testing.assert_close(late, sinusoidal_positions(5000, 3, 16))
    assert model(batch([700]), batch([650])).isfinite().all()


def test_learned_positions_end_with_a_clear_error() -> None:
    """M12: a learned table has an end, which must be an error and no wild read."""
    model = tiny(positions="learned", max_positions=8)
    assert model.max_positions == 8
    model(batch([8]), batch([8]))
    with pytest.raises(ValueError, match="beyond the 8 learned positions"):
        model(batch([9]), batch([4]))


def test_table_keeps_its_precision_in_half_models() -> None:
    """M17, M03: the table is computed in float32, is cast at the end, and moves with the model."""
    model = tiny(d_model=64).to(torch.bfloat16)
    table = model.encoder.positions(0, 2001)
    assert table.dtype == torch.bfloat16
    torch.testing.assert_close(table, sinusoidal_positions(0, 2001, 64).bfloat16())
    assert not torch.equal(table[256], table[257])


# --- embeddings ---------------------------------------------------------------------------------


@pytest.mark.parametrize("d_model", [64, 512])
@pytest.mark.parametrize("tie", ["all", "target", "none"])
def test_embedding_scale(d_model: int, tie: str) -> None:
    """M14: initial deviation 1/sqrt(d) times sqrt(d), once, on both sides: unit inputs."""
    torch.manual_seed(0)
    config = ModelConfig(d_model=d_model, num_heads=4, encoder_layers=1, decoder_layers=1,
                         dropout=0.0, tie=tie)  # fmt: skip
    model = Transformer(config, 500, 500)
    ids = torch.arange(500)[None]
    for stack in (model.encoder, model.decoder):
        assert stack.embed_tokens.weight.std().item() == pytest.approx(d_model**-0.5, rel=0.05)
        scaled = stack.embed(ids) - stack.positions(0, 500)
        assert scaled.std().item() == pytest.approx(1.0, rel=0.05)
    assert model.lm_head.weight.std().item() == pytest.approx(d_model**-0.5, rel=0.05)


def test_tied_tensors_are_one_tensor() -> None:
    """Tied means the same storage, counted, updated and saved once."""
    model = tiny(tie="all")
    assert model.encoder.embed_tokens.weight is model.decoder.embed_tokens.weight
    assert model.lm_head.weight is model.decoder.embed_tokens.weight
    target = tiny(tie="target")
    assert target.lm_head.weight is target.decoder.embed_tokens.weight
    assert target.encoder.embed_tokens.weight is not target.decoder.embed_tokens.weight
    free = tiny(tie="none")
    assert free.parameter_count() - model.parameter_count() == 2 * VOCAB * 16
    assert free.parameter_count() - target.parameter_count() == VOCAB * 16


def test_tying_two_vocabularies_is_refused() -> None:
    """R17: shared embeddings over two vocabularies of different size are nonsense."""
    with pytest.raises(ValueError, match="one vocabulary"):
        Transformer(ModelConfig(tie="all"), 10, 11)


# --- masks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_future_and_padding_do_not_reach_the_output(norm: str) -> None:
    """M04, M16: position t must not change when later targets do, nor when padding does."""
    model = tiny(norm=norm)
    src, tgt = batch([5, 9]), batch([8, 8])
    base = model(src, tgt)
    changed = tgt.clone()
    changed[:, 4:] = (changed[:, 4:] % (VOCAB - 4)) + 4
    torch.testing.assert_close(model(src, changed)[:, :4], base[:, :4], rtol=0, atol=1e-6)
    assert not torch.allclose(model(src, changed)[:, 4:], base[:, 4:])
    with torch.no_grad():
        model.encoder.embed_tokens.weight[0] += 3.0
    torch.testing.assert_close(model(src, tgt), base, rtol=0, atol=1e-6)


def test_padding_content_and_amount_do_not_leak() -> None:
    """M06: a sentence alone, beside a five times longer one, and over rubbish padding."""
    model = tiny()
    alone, tgt = batch([6]), batch([5])
    expected = model.encode(alone, model.source_mask(alone))
    both = torch.zeros(2, 30, dtype=torch.int64)
    both[0, :6], both[1] = alone[0], batch([30])[0]
    mask = model.source_mask(both)
    memory = model.encode(both, mask)
    torch.testing.assert_close(memory[:1, :6], expected, rtol=0, atol=1e-5)
    rubbish = both.clone()
    rubbish[0, 6:] = torch.randint(4, VOCAB, (24,))
    torch.testing.assert_close(model.encode(rubbish, mask)[:1, :6], expected, rtol=0, atol=1e-5)
    hidden = model.decode(tgt.expand(2, -1), memory, mask)
    torch.testing.assert_close(hidden[:1], model(alone, tgt), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_row_with_nothing_to_attend_to(dtype: torch.dtype) -> None:
    """M01, M02: an empty source gives finite numbers and gradients, and harms no other row."""
    model = tiny(tie="none")
    src, tgt = batch([7, 7, 7]), batch([5, 5, 5])
    full = src.clone()
    src[1] = 0
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        hidden = model(src, tgt)
        sums = smoothed_loss(hidden, model.lm_head.weight, tgt, 0.1)
        # Of the same shape: kernels may round otherwise for another number of rows.
        without = model(full, tgt)
    sums.smoothed.backward()
    assert hidden.isfinite().all() and sums.smoothed.isfinite()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert torch.equal(hidden[[0, 2]], without[[0, 2]])


def test_train_mode_without_dropout_equals_evaluation() -> None:
    """M21: no other code path in evaluation, also when the last columns are all padding."""
    model = tiny()
    src, tgt = batch([4, 6], width=11), batch([5, 3])
    with torch.no_grad():
        evaluated = model(src, tgt)
        trained = model.train()(src, tgt)
    assert evaluated.shape == trained.shape == (2, 5, 16)
    torch.testing.assert_close(evaluated, trained, rtol=0, atol=1e-5)


def test_every_dropout_is_off_in_evaluation() -> None:
    """M13: attention, activation, embedding and residual dropout; two passes are equal bits."""
    model = tiny(dropout=0.3, attention_dropout=0.3, activation_dropout=0.3)
    src, tgt = batch([5, 9]), batch([8, 8])
    assert torch.equal(model(src, tgt), model(src, tgt))
    model.train()
    outputs = []
    for update in (1, 1, 2):
        model.dropout_keys.set(seed=1, update=update, micro_batch=0)
        outputs.append(model(src, tgt))
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])


def test_dropout_follows_the_embedding_once() -> None:
    """A classic: dropout inside the position layer and again in the encoder."""
    model = tiny(dropout=0.5, encoder_layers=1).train()
    model.dropout_keys.set(1, 1, 0)
    embedded = model.encoder.embed(torch.randint(4, VOCAB, (50, 40)))
    assert (embedded == 0).double().mean().item() == pytest.approx(0.5, abs=0.02)


# --- names --------------------------------------------------------------------------------------


def test_parameter_names_are_those_of_bart() -> None:
    """Export is renaming only as long as these names stand."""
    names = {name for name, _ in tiny(norm="pre", tie="none").named_parameters()}
    for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight",
                 "encoder.layers.0.self_attn.q_proj.weight", "encoder.layers.1.fc1.bias",
                 "decoder.layers.1.encoder_attn.out_proj.bias", "encoder.layer_norm.weight",
                 "decoder.layers.0.encoder_attn_layer_norm.weight", "decoder.layer_norm.bias",
                 "decoder.layers.0.final_layer_norm.weight"):  # fmt: skip
        assert name in names


# --- what can be left out -----------------------------------------------------------------------


@pytest.mark.parametrize("length", [7, 140])  # explicit products, and the library's kernel
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_without_the_scale_of_attention(length: int, dropout: float) -> None:
    """Every way to compute attention must leave the scale out: queries that are larger by sqrt(E)
    in a model with the scale give the same."""
    with_scale = tiny(attention_dropout=dropout).train()
    without = tiny(attention_dropout=dropout, scale_attention=False).train()
    src, tgt = batch([length, length - 2]), batch([length - 1, length])
    with torch.no_grad():
        assert not torch.allclose(with_scale(src, tgt), without(src, tgt), atol=1e-3)
        for name, parameter in with_scale.named_parameters():
            if ".q_proj." in name:
                parameter.mul_(2.0)  # sqrt(16 / 4)
        torch.testing.assert_close(with_scale(src, tgt), without(src, tgt), rtol=1e-4, atol=1e-4)


def test_without_the_scale_of_embeddings() -> None:
    """Embeddings enter as they are."""
    with_scale, without = tiny(tie="none"), tiny(tie="none", scale_embedding=False)
    src, tgt = batch([5, 3]), batch([4, 6])
    assert not torch.allclose(with_scale(src, tgt), without(src, tgt), atol=1e-3)
    with torch.no_grad():
        for stack in (with_scale.encoder, with_scale.decoder):
            stack.embed_tokens.weight.div_(4.0)  # sqrt(16)
    torch.testing.assert_close(with_scale(src, tgt), without(src, tgt))


def test_word_dropout_takes_whole_vectors() -> None:
    """Word dropout must leave positions alone, differ between both sides, and end with training."""
    model = tiny(word_dropout=0.5).train()
    model.dropout_keys.set(1, 1, 0)
    ids = batch([200])
    with torch.no_grad():
        embedded = model.encoder.embed(ids) - model.encoder.positions(0, 200)
        again = model.decoder.embed(ids) - model.decoder.positions(0, 200)
    gone = embedded[0].abs().amax(-1) < 1e-5
    assert 60 < int(gone.sum()) < 140
    kept = model.encoder.embed_tokens(ids)[0, ~gone] * (4.0 / 0.5)
    torch.testing.assert_close(embedded[0, ~gone], kept, rtol=1e-4, atol=1e-4)
    assert bool((gone != (again[0].abs().amax(-1) < 1e-5)).any())
    model.eval()
    plain = model.encoder.embed(ids)
    torch.testing.assert_close(
        plain, model.encoder.embed_tokens(ids) * 4.0 + model.encoder.positions(0, 200)
    )
