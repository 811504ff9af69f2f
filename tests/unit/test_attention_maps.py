"""Weights must be those of the real computation; words must be those of `str.split`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mttrain.attention import Attention
from mttrain.attention_maps import (
    Encoded,
    attention_maps,
    collect_weights,
    encode_pair,
    encode_translation,
    links,
    piece_words,
    recorded_weights,
    unit_groups,
    unit_weights,
)
from mttrain.config import ModelConfig
from mttrain.model import Transformer
from mttrain.tokenizer import BOS_ID, EOS_ID, Tokenizer, train_tokenizer
from mttrain.translator import TranslateOptions, Translator


def small_model(norm: Literal["pre", "post"] = "pre") -> Transformer:
    config = ModelConfig(
        d_model=16, d_ff=24, num_heads=4, encoder_layers=2, decoder_layers=3, dropout=0.1,
        attention_dropout=0.2, norm=norm,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = Transformer(config, 40, 40)
        for parameter in model.parameters():  # weights far from even, biases that count
            parameter.data += 0.4 * torch.randn_like(parameter)
    return model.eval()


def random_pairs(count: int, longest: int) -> list[Encoded]:
    chooser = random.Random(7)

    def ids() -> list[int]:
        return [*(chooser.randint(4, 39) for _ in range(chooser.randint(1, longest))), EOS_ID]

    return [Encoded(ids(), ids()) for _ in range(count)]


PAIRS = random_pairs(4, 9)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_output_is_that_of_the_model(norm: Literal["pre", "post"]) -> None:
    """Stops a walk of its own that forgets a norm, a scale or a bias; and traces left behind."""
    model = small_model(norm)
    src = torch.tensor([PAIRS[0].source])
    tgt = torch.tensor([PAIRS[0].read])
    with torch.no_grad():
        before = model(src, tgt)
        with recorded_weights(model) as found:
            recorded = model(src, tgt)
        after = model(src, tgt)
    torch.testing.assert_close(recorded, before, rtol=0, atol=1e-5)
    assert torch.equal(before, after)
    assert len(found) == 2 + 2 * 3
    for module in model.modules():
        assert not {"forward", "cross"} & vars(module).keys()


def test_recording_ends_with_an_error_too() -> None:
    model = small_model()
    with pytest.raises(ValueError, match="mine"), recorded_weights(model):
        raise ValueError("mine")
    assert not any("forward" in vars(module) for module in model.modules())


def test_weights_times_values_give_the_output_of_an_attention() -> None:
    """Stops weights of another computation: out of them the attention's output is made again."""
    model = small_model()
    attention = model.decoder.layers[1].encoder_attn
    assert isinstance(attention, Attention)
    x, memory = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    with torch.no_grad():
        expected = attention.cross(x, memory, None)
        with recorded_weights(model) as found:
            attention.cross(x, memory, None)
        (weights,) = found.values()
        value = attention.v_proj(memory).view(2, 7, 4, 4).transpose(1, 2)  # [B, H, S, E]
        context = (weights @ value).transpose(1, 2).reshape(2, 5, 16)
        again = attention.out_proj(context)
    torch.testing.assert_close(again, expected, rtol=0, atol=1e-5)


def test_rows_sum_to_one_and_masked_positions_get_nothing() -> None:
    """Stops weight on padding or on what lies ahead; padding may not change a sentence either."""
    model = small_model()
    for pair, together in zip(PAIRS, collect_weights(model, PAIRS), strict=True):
        (alone,) = collect_weights(model, [pair])
        sizes = {
            "encoder": (2, 4, len(pair.source), len(pair.source)),
            "decoder": (3, 4, len(pair.target), len(pair.target)),
            "cross": (3, 4, len(pair.target), len(pair.source)),
        }
        for kind, weights in together.items():
            assert tuple(weights.shape) == sizes[kind]
            # Over the real positions alone: so nothing is left for padding.
            torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
            torch.testing.assert_close(weights, alone[kind], rtol=0, atol=1e-5)
        assert not together["decoder"].triu(1).any()


def test_training_mode_is_kept() -> None:
    model = small_model().train()
    collect_weights(model, PAIRS[:1])
    assert model.training


# ---- sentences --------------------------------------------------------------------------------


def test_tokens_are_what_the_model_reads_and_writes(random_run: Path) -> None:
    """Stops axes that are one step off: BOS is read first, EOS is written last, the source ends
    with EOS."""
    translator = Translator.load(random_run)
    maps = attention_maps(translator, encode_pair(translator, "the small house.", "ein Haus."))
    assert maps.source[-1] == "</s>"
    assert maps.read == ["<s>", *maps.written[:-1]]
    assert maps.written[-1] == "</s>"
    rows, columns = maps.axes("cross")
    assert columns == maps.source
    assert rows[0] == f"<s> → {maps.written[0]}"
    assert maps.axes("encoder") == (maps.source, maps.source)


def test_translation_that_was_cut_has_no_eos(random_run: Path) -> None:
    translator = Translator.load(random_run)
    options = translator.completed(TranslateOptions(beam=1, max_length=3))
    (found,) = translator.translate_lines(["the small house."], options)
    pair = encode_translation(translator, found, options)
    ended = found.hypotheses[0].finished
    assert (pair.target[-1] == EOS_ID) == ended
    assert pair.read[0] == BOS_ID
    assert len(pair.read) == len(pair.target)


# ---- words ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    text = ["the house is small.", "das Haus ist klein.", "größer ▁ <0x41> 日本語 です"]
    return train_tokenizer(text * 3, vocab_size=320)


@given(text=st.text(st.sampled_from("ab \t\u3000\u2028é日▁<0x4>\x1c\x85"), max_size=30))
@settings(max_examples=200, deadline=None)
def test_words_are_those_of_split(tokenizer: Tokenizer, text: str) -> None:
    """Stops alignments that count other words than the tools which read them."""
    ids = tokenizer.encode(text)
    words = piece_words([tokenizer.token(index) for index in ids])
    assert len(words) == len(ids)
    parts: dict[int, list[int]] = {}
    for index, word in zip(ids, words, strict=True):
        if word >= 0:
            parts.setdefault(word, []).append(index)
    assert [tokenizer.decode(parts[n]).strip() for n in sorted(parts)] == text.split()


def test_bytes_that_are_no_text_are_counted_too(tokenizer: Tokenizer) -> None:
    """A model may write half a character; the words after it must stay in their places."""
    ids = [*tokenizer.encode("a"), 4 + 0xC3, *tokenizer.encode(" b")]
    assert len(tokenizer.decode(ids).split()) == 2
    assert piece_words([tokenizer.token(index) for index in ids])[-1] == 1


def test_units(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("the house"), EOS_ID]
    groups = unit_groups(tokenizer, ids, "word")
    assert groups[-1] == -1
    assert sorted(set(groups)) == [-1, 0, 1]
    assert unit_groups(tokenizer, ids, "piece") == [*range(len(ids) - 1), -1]


def test_word_weights_by_hand() -> None:
    """Source pieces are summed, target pieces averaged, and EOS is the rest."""
    weights = torch.tensor(
        [
            [0.1, 0.2, 0.6, 0.1],  # first piece of target word 0
            [0.3, 0.4, 0.2, 0.1],  # its second piece
            [0.0, 0.1, 0.1, 0.8],  # target word 1: EOS has the most
            [0.0, 0.0, 0.0, 1.0],  # the step that writes EOS
        ]
    )
    words = unit_weights(weights, [0, 0, 1, -1], [0, 0, 1, -1])
    expected = torch.tensor([[0.5, 0.4, 0.1], [0.1, 0.1, 0.8]])
    torch.testing.assert_close(words, expected)
    assert links(words) == [(0, 0)]


def test_links_are_sorted_by_the_source() -> None:
    weights = torch.tensor([[0.0, 0.9, 0.1], [0.8, 0.1, 0.1], [0.2, 0.7, 0.1]])
    assert links(weights) == [(0, 1), (1, 0), (1, 2)]


def test_nothing_to_link() -> None:
    assert links(unit_weights(torch.ones(1, 1), [-1], [-1])) == []
    assert links(unit_weights(torch.ones(1, 1), [-1], [0])) == []
