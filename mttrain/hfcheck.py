"""Whether a directory written for transformers translates as the model that it was made of.

Three comparisons, each of which finds what the others let pass: the ids of text, hostile text
included (a tokenizer that normalises, strips, or takes "</s>" for a control symbol); the logits for
our own greedy translations and for long random ones (a weight, a scale, a mask, a position); and
the text of transformers' own greedy search (start and end symbols, forbidden tokens, the cache,
turning ids into text).

Shapes: B sentences, S source length, T target length, V vocabulary of the target.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mttrain.errors import CheckpointError
from mttrain.segments import cut_ids, padded
from mttrain.tokenizer import BOS_ID, EOS_ID, PAD_ID, Tokenizer
from mttrain.translator import TranslateOptions, Translator

TARGET_FOLDER = "target"  # of the second tokenizer, where there are two
TOLERANCE = 1e-4
"""Largest difference between logits; for logits beyond 10, a hundred-thousandth of the largest."""

# Text that a tokenizer of another make would change.
HOSTILE = (
    "", " ", "  two  spaces  ", "</s>", "<s> a <pad>b<unk> c</s>", "a</s>b", "<pad>", "É e\u0301 ﬁ",
    "👩\u200d👩\u200d👧 🤷🏽 🇩🇪", "tab\tform\x0cfeed\u2028line\u0085nul\x00", "l1\nl2\r\nl3",
    "don't I'LL O’Neill", "中文和English混排", "العربية می\u200cخواهم", "नमस्ते", "1234567890" * 8,
    "x" * 200, "\ufeffmark \u00a0\u200b", "Ġ▁ <0x0A>",
)  # fmt: skip
_BATCH = 16  # lines at a time
_PROBE = 200  # tokens of a random pair
_SHOWN = 60  # characters of a line in a message


@dataclass(frozen=True)
class Comparison:
    """equal: lines with the same text from both; the largest difference of a logit."""

    equal: int
    largest_difference: float
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Ours:
    """A line, its ids with EOS, our greedy translation and its tokens without EOS."""

    line: str
    source: list[int]
    text: str
    tokens: list[int]


def compare(
    library: Any,
    folder: Path,
    translator: Translator,
    lines: Sequence[str],
    longest: int,
    separate: bool,
) -> Comparison:
    """Compare the directory with the model of the translator on the lines.

    longest: output tokens, EOS included; separate: the target has a tokenizer of its own. Raises
    CheckpointError for the first thing that differs, ties between two tokens excepted.
    """
    tag = translator.needed_tag
    limit = translator.completed(TranslateOptions(tag=tag)).max_source_length
    source = _load_tokenizer(library, folder)
    target = _load_tokenizer(library, folder / TARGET_FOLDER) if separate else source
    _compare_tokenizer(source, translator.source_tokenizer, [*lines, *HOSTILE], limit)
    _compare_tokenizer(target, translator.target_tokenizer, HOSTILE, longest)
    model = library.AutoModelForSeq2SeqLM.from_pretrained(
        folder, local_files_only=True, dtype=torch.float32
    ).eval()
    lines = [line for line in lines if line.strip()]  # a blank one never reaches our model
    sources = translator.encode_sources(lines, tag)
    longest = min(longest, 3 * max(map(len, sources), default=0) + 20)
    options = TranslateOptions(beam=1, max_length=longest, tag=tag)
    found = [
        _Ours(line, cut_ids(ids, limit)[0], answer.text, list(answer.hypotheses[0].tokens))
        for line, ids, answer in zip(
            lines, sources, translator.translate_lines(lines, options), strict=True
        )
    ]
    found.sort(key=lambda item: len(item.source))  # little padding in a batch, but some
    equal, ties = 0, 0
    with torch.no_grad():
        probes = _probes(translator)
        largest = _difference(*_logits(translator.bundles[0].model, model, probes), probes)
        for start in range(0, len(found), _BATCH):
            batch = found[start : start + _BATCH]
            mine, theirs = _logits(translator.bundles[0].model, model, batch)
            largest = max(largest, _difference(mine, theirs, batch))
            for item, logits, ids in zip(batch, mine, _greedy(model, batch, longest), strict=True):
                text = target.decode(ids, skip_special_tokens=True)
                equal += text == item.text
                if text != item.text and not _is_tie(item, logits, ids):
                    raise _unlike(item.line, f"{_short(item.text)} became {_short(text)}")
                ties += text != item.text
    notes = [f"{ties} lines differ where two tokens are equally likely."] if ties else []
    return Comparison(equal, largest, tuple(notes))


def _load_tokenizer(library: Any, folder: Path) -> Any:
    return library.AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _compare_tokenizer(
    theirs: Any, ours: Tokenizer, lines: Sequence[str], limit: int | None
) -> None:
    """The same ids for the same text, and the same text for those ids."""
    answers = theirs(list(lines), truncation=True, max_length=limit)["input_ids"]
    for line, ids, answer in zip(lines, ours.encode_batch(lines), answers, strict=True):
        wanted, _ = cut_ids(ids, limit)
        if answer != wanted:
            raise _unlike(line, f"ids {wanted[:20]} became {answer[:20]}")
        text = theirs.decode(answer, skip_special_tokens=True)
        if text != ours.decode(wanted):
            raise _unlike(line, f"its ids are turned into the text {_short(text)}")


def _probes(translator: Translator) -> list[_Ours]:
    """Two pairs of random ids, one long, one short: every position up to `_PROBE` is looked at."""
    most = min(_PROBE, translator.max_positions or _PROBE)
    draw = random.Random(1)
    sides = (translator.source_tokenizer.size, translator.target_tokenizer.size)
    probes = []
    for length in (most, most // 2):
        source, target = (
            [draw.randrange(EOS_ID + 1, size) for _ in range(length - 1)] for size in sides
        )
        probes.append(_Ours("(random ids)", [*source, EOS_ID], "", target))
    return probes


def _logits(mine: Any, theirs: Any, batch: Sequence[_Ours]) -> tuple[list[Tensor], list[Tensor]]:
    """For each sentence the logits [T, V] of both for our translation, BOS first."""
    cpu = torch.device("cpu")
    src = padded([item.source for item in batch], cpu)  # [B, S]
    tgt = padded([[BOS_ID, *item.tokens] for item in batch], cpu)  # [B, T]
    ours = mine.project(mine(src, tgt))
    other = theirs(
        input_ids=src, attention_mask=(src != PAD_ID).long(), decoder_input_ids=tgt
    ).logits
    lengths = [len(item.tokens) + 1 for item in batch]
    vocab = ours.shape[-1]  # theirs may be filled up
    return (
        [row[:length] for row, length in zip(ours, lengths, strict=True)],
        [row[:length, :vocab] for row, length in zip(other, lengths, strict=True)],
    )


def _difference(mine: Sequence[Tensor], theirs: Sequence[Tensor], batch: Sequence[_Ours]) -> float:
    """The largest difference between logits, if it is small; no number is never small."""
    largest = 0.0
    for item, one, other in zip(batch, mine, theirs, strict=True):
        difference = (one - other).abs().max().item()
        if not difference <= max(TOLERANCE, TOLERANCE / 10 * one.abs().max().item()):
            raise _unlike(item.line, f"logits differ by {difference:.1e}")
        largest = max(largest, difference)
    return largest


def _greedy(model: Any, batch: Sequence[_Ours], longest: int) -> Iterator[list[int]]:
    """What transformers' own greedy search finds: ids without BOS."""
    src = padded([item.source for item in batch], torch.device("cpu"))
    mask = (src != PAD_ID).long()
    plain = {"num_beams": 1, "length_penalty": 1.0, "early_stopping": False}
    outputs = model.generate(
        input_ids=src, attention_mask=mask, max_length=longest + 1, do_sample=False, **plain
    )
    for row in outputs.tolist():
        yield row[1:]


def _is_tie(item: _Ours, logits: Tensor, ids: Sequence[int]) -> bool:
    """Whether the two translations part at two tokens that are equally likely but for rounding."""
    ours = [*item.tokens, EOS_ID]
    for row, mine, other in zip(logits, ours, ids, strict=False):
        if mine != other:
            return bool((row[mine] - row[other]).abs() <= 2 * TOLERANCE)
    return False


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")


def _unlike(line: str, problem: str) -> CheckpointError:
    return CheckpointError(
        f"The export was not written: transformers does not compute what the model does. At the "
        f"line {_short(line)} {problem}."
    )
