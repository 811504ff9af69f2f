"""Attention weights of a translation, and the word alignment that is read off them.

The model walks its own layers, with one thing replaced: each attention computes its weights one by
one (equation 1 of Vaswani et al. 2017) and hands them out before it uses them, whatever kernel it
takes otherwise. Training and translating never come through here and pay nothing.

A word is a run without white space, as `str.split` finds it. Its weight on a source word is summed
over the pieces of the source word and averaged over its own (Garg et al. 2019, section 3).

Price: one forward pass a batch, with all weights in memory: L x B x H x T x S numbers of each kind.

Shapes: B sentences, S source length and T target length in tokens, D d_model, H heads, L layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mttrain.attention import Attention
from mttrain.linear import linear
from mttrain.model import Transformer
from mttrain.segments import cut_ids, padded
from mttrain.tokenizer import BOS_ID, EOS_ID, PAD_ID, Tokenizer
from mttrain.translations import Translation
from mttrain.translator import TranslateOptions, Translator

Kind = Literal["encoder", "decoder", "cross"]
KINDS: tuple[Kind, ...] = ("encoder", "decoder", "cross")
Link = tuple[int, int]

_BYTE = re.compile(r"<0x[0-9A-F]{2}>|.", re.DOTALL)
_NAMES: dict[Kind, str] = {
    "encoder": "encoder.layers.{}.self_attn",
    "decoder": "decoder.layers.{}.self_attn",
    "cross": "decoder.layers.{}.encoder_attn",
}


@dataclass(frozen=True, slots=True)
class Encoded:
    """A source with EOS, and a target with EOS unless it was cut at the output limit."""

    source: list[int]
    target: list[int]

    @property
    def read(self) -> list[int]:
        """The decoder's input: BOS and all of the target but its last token."""
        return [BOS_ID, *self.target[:-1]]


@dataclass(frozen=True)
class AttentionMaps:
    """Weights of one sentence pair by kind, each [L, H, queries, keys]; every row sums to 1.

    encoder: source tokens to source tokens; decoder: tokens read to tokens read; cross: tokens read
    to source tokens. A decoder row at the token read is the step that writes the token at the same
    place of `written`.
    """

    source: list[str]
    read: list[str]
    written: list[str]
    weights: dict[Kind, Tensor]

    def axes(self, kind: Kind) -> tuple[list[str], list[str]]:
        """Labels of the rows (queries) and of the columns (keys) of a kind.

        A step of the decoder is named by the token it reads and the token it writes.
        """
        if kind == "encoder":
            return self.source, self.source
        pairs = zip(self.read, self.written, strict=True)
        steps = [f"{read} → {written}" for read, written in pairs]
        return steps, self.read if kind == "decoder" else self.source


# ---- weights ----------------------------------------------------------------------------------


@contextmanager
def recorded_weights(model: Transformer) -> Iterator[dict[str, Tensor]]:
    """Inside, every attention of the model leaves its weights [B, H, T, S] under its own name.

    The names are those of the modules, such as `decoder.layers.0.encoder_attn`. What the model
    computes stays the same but for rounding.
    """
    found: dict[str, Tensor] = {}
    layers = {name: part for name, part in model.named_modules() if isinstance(part, Attention)}
    try:
        for name, attention in layers.items():
            own, cross = _explicit(attention, name, found)
            attention.forward = own  # type: ignore[method-assign]
            attention.cross = cross  # type: ignore[method-assign]
        yield found
    finally:
        for attention in layers.values():
            attention.__dict__.pop("forward", None)
            attention.__dict__.pop("cross", None)


def _explicit(
    attention: Attention, name: str, found: dict[str, Tensor]
) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """`forward` and `cross` of an attention, which keep the weights they use in `found`."""

    def mixed(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
        weights = found[name] = attention.weights(q, k, bias, causal)
        context = torch.matmul(weights, v)  # [B, H, T, E]
        batch, _, length, _ = context.shape
        out: Tensor = attention.out_proj(context.transpose(1, 2).reshape(batch, length, -1))
        return out

    def own(x: Tensor, bias: Tensor | None, causal: bool = False) -> Tensor:
        q, k, v = attention.split_heads(linear(x, *attention.joined("q", "k", "v")), 3)
        return mixed(q, k, v, bias, causal)

    def cross(x: Tensor, memory: Tensor, bias: Tensor | None) -> Tensor:
        (q,) = attention.split_heads(attention.q_proj(x), 1)
        k, v = attention.split_heads(linear(memory, *attention.joined("k", "v")), 2)
        return mixed(q, k, v, bias, False)

    return own, cross


def collect_weights(
    model: Transformer, pairs: Sequence[Encoded], kinds: Sequence[Kind] = KINDS
) -> list[dict[Kind, Tensor]]:
    """For each pair the weights [L, H, queries, keys] of each kind, on the CPU, without padding."""
    device = next(model.parameters()).device
    src = padded([pair.source for pair in pairs], device)
    tgt_in = padded([pair.read for pair in pairs], device)
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), recorded_weights(model) as found:
            model(src, tgt_in)
    finally:
        model.train(training)
    layers = {"encoder": len(model.encoder.layers)}
    stacked = {
        kind: torch.stack(
            [
                found[_NAMES[kind].format(n)]
                for n in range(layers.get(kind, len(model.decoder.layers)))
            ],
            1,
        )
        .float()
        .cpu()
        for kind in kinds
    }  # each [B, L, H, T, S]
    return [
        {
            kind: _without_padding(kind, values[row], len(pair.source), len(pair.target))
            for kind, values in stacked.items()
        }
        for row, pair in enumerate(pairs)
    ]


def _without_padding(kind: Kind, weights: Tensor, source: int, target: int) -> Tensor:
    """[L, H, T, S] of a batch -> that of the sentence, as its own storage"""
    rows = source if kind == "encoder" else target
    columns = target if kind == "decoder" else source
    return weights[:, :, :rows, :columns].clone()


# ---- sentences --------------------------------------------------------------------------------


def encode_pair(
    translator: Translator,
    source: str,
    target: str,
    longest: int | None = None,
    tag: str | None = None,
) -> Encoded:
    """The ids of a given pair, cut to what the model can read (source: to `longest`)."""
    (tokens,) = translator.encode_sources([source], tag)
    wanted = translator.target_tokenizer.encode(target)
    return Encoded(
        cut_ids(tokens, longest or translator.max_positions)[0],
        cut_ids(wanted, translator.max_positions)[0],
    )


def encode_translation(
    translator: Translator, translation: Translation, options: TranslateOptions
) -> Encoded:
    """The ids that the search read and wrote for a line that is not blank."""
    best = translation.hypotheses[0]
    (tokens,) = translator.encode_sources([translation.source], options.tag)
    source, _ = cut_ids(tokens, options.max_source_length)
    return Encoded(source, [*best.tokens, EOS_ID] if best.finished else list(best.tokens))


def attention_maps(
    translator: Translator, pair: Encoded, kinds: Sequence[Kind] = KINDS
) -> AttentionMaps:
    """Weights and tokens of one pair, by the first model of the translator."""
    (weights,) = collect_weights(translator.models[0], [pair], kinds)
    return AttentionMaps(
        [translator.source_tokenizer.token(index) for index in pair.source],
        [translator.target_tokenizer.token(index) for index in pair.read],
        [translator.target_tokenizer.token(index) for index in pair.target],
        weights,
    )


# ---- words ------------------------------------------------------------------------------------


def piece_words(pieces: Sequence[str]) -> list[int]:
    """The number of the word, from 0, that each piece ends in; -1 for white space alone.

    pieces: as `Tokenizer.token` writes them, of one text, without special tokens.
    """
    parts = [_piece_bytes(piece) for piece in pieces]
    # Bytes that are not UTF-8 become one character each, so that places can be counted.
    text = b"".join(parts).decode("utf-8", "surrogateescape")
    word_at: list[int] = []  # for each byte
    for number, run in enumerate(re.split(r"(\s+)", text.lstrip())):
        word = number // 2 if number % 2 == 0 else -1
        word_at += [word] * len(run.encode("utf-8", "surrogateescape"))
    blank = sum(map(len, parts)) - len(word_at)  # white space that the text begins with
    word_at = [-1] * blank + word_at
    words, end = [], 0
    for part in parts:
        start, end = end, end + len(part)
        words.append(max(word_at[start:end], default=-1))
    return words


def _piece_bytes(piece: str) -> bytes:
    """What a piece stands for: "▁" is a space and <0xE4> a byte."""
    return b"".join(
        b" " if sign == "▁" else bytes([int(sign[3:5], 16)]) if len(sign) > 1 else sign.encode()
        for sign in _BYTE.findall(piece)
    )


def unit_groups(
    tokenizer: Tokenizer, tokens: Sequence[int], unit: Literal["word", "piece"]
) -> list[int]:
    """For each id the number of its word or piece, from 0; -1 for special tokens, a tag and white
    space.

    A tag begins the text, a special token ends it.
    """
    first = [-1] * int(len(tokens) > 0 and tokens[0] in tokenizer.tags.values())
    real = [token for token in tokens[len(first) :] if token not in (PAD_ID, BOS_ID, EOS_ID)]
    if unit == "piece":
        groups = list(range(len(real)))
    else:
        groups = piece_words([tokenizer.token(token) for token in real])
    return first + groups + [-1] * (len(tokens) - len(first) - len(real))


def unit_weights(weights: Tensor, source: Sequence[int], target: Sequence[int]) -> Tensor:
    """Weights [T, S] of tokens -> [target words, source words + 1]; the last column is the rest.

    source, target: the word of each source token and of each token written, -1 for none.
    """
    width, height = max(source, default=-1) + 1, max(target, default=-1) + 1
    columns = torch.tensor([word if word >= 0 else width for word in source])
    summed = weights.new_zeros(weights.shape[0], width + 1).index_add_(1, columns, weights)
    rows = torch.tensor([word if word >= 0 else height for word in target])
    out = weights.new_zeros(height + 1, width + 1).index_add_(0, rows, summed)
    counts = torch.bincount(rows, minlength=height + 1).clamp(min=1)
    return (out / counts[:, None])[:height]


def links(weights: Tensor) -> list[Link]:
    """(source word, target word) for each target word, from `unit_weights`; sorted.

    Each target word is linked with the source word that has the greatest weight, the first of
    equal ones; to none when the rest (EOS, white space) has more than any.
    """
    if weights.shape[1] < 2:
        return []
    best = weights.argmax(1).tolist()
    rest = weights.shape[1] - 1
    return sorted((source, target) for target, source in enumerate(best) if source != rest)
