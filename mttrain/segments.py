"""Source lines as rows of batches: numbered, cut, split at sentence ends, sorted into batches.

Lengths are in subwords with EOS unless said otherwise. A cut line keeps its EOS: a model that has
only seen whole sentences would go on looking for the end. Sentence ends are told by signs alone,
without a model of the language: rather one part too long than a sentence torn at "Mr.".

Shapes: B rows of a batch, S longest of them.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from mttrain.errors import DataError
from mttrain.machine import out_of_memory
from mttrain.searchstep import SearchOptions
from mttrain.tokenizer import EOS_ID, PAD_ID, Tokenizer

# Padded source tokens of a batch, each hypothesis counted; only a GPU gains from more. Greedy
# search on a CPU is fastest with fewer: keys and values of the sources then stay in its caches.
DEFAULT_BATCH_TOKENS = 8192
MOST_SOURCE_TOKENS = 3072
DEFAULT_BATCH_TOKENS_DEVICE = 65_536
DEFAULT_WINDOW = 2048  # lines

# A period does not end a sentence after a digit ("3. Mai"), after a single letter ("z. B.", "J. S.
# Bach") and after these, in any case; some of them may also stand at an end, which is then missed.
_ABBREVIATIONS = (
    "mr", "mrs", "ms", "dr", "prof", "sr", "sra", "st", "jr", "vs", "etc", "hr", "fr", "nr", "ca",
    "bzw", "usw", "usf", "vgl", "evtl", "ggf",
)  # fmt: skip
_NO_END = "".join(rf"(?<!(?i:\b{word}\.))" for word in (r"\w", *_ABBREVIATIONS))
# Otherwise a sentence ends after . ! ? … and closing quotes or brackets before white space, and
# after the Chinese and Japanese signs, which no space follows.
_SENTENCE_END = re.compile(rf"(?<=[.!?…])(?<!\d\.){_NO_END}[\"'»”’)\]]*(?=\s)|[。！？]+[」』”’）]*")


class PrefixCountError(DataError):
    """There are not as many prefixes as source lines."""


Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class TranslateOptions(SearchOptions):
    """How to search, as `SearchOptions`, and how to batch."""

    # Padded source tokens of a batch, times the hypotheses; None = 8192 and at most 3072 of the
    # sources, on a GPU 65536.
    batch_tokens: int | None = None
    batch_size: int | None = None  # sentences of a batch, instead
    window: int | None = None  # lines read ahead and sorted; None = 2048, or 1 for batch_size 1
    # Subwords read of a line, EOS included; None = the model's positions where they are learned,
    # otherwise 1000, or the training length if that is more.
    max_source_length: int | None = None
    # Translate lines that are longer than that, or than the training length, in parts.
    split_long: bool = False
    tag: str | None = None  # the tag, by its name, that is put before each source

    def _rules(self) -> list[tuple[bool, str]]:
        both = self.batch_tokens is not None and self.batch_size is not None
        counts = ("batch_tokens", "batch_size", "window")
        least = self.max_source_length is not None and self.max_source_length < 2
        return [
            *super()._rules(),
            (both, "give batch_tokens or batch_size, not both"),
            (
                self.split_long and self.nbest > 1,
                f"with split_long there is one output for a line, not nbest {self.nbest}: the "
                "lists of its parts make no list of the whole",
            ),
            (least, f"max_source_length is {self.max_source_length}; it must be 2 or more"),
            *(
                (value is not None and value < 1, f"{name} is {value}; it must be 1 or more")
                for name, value in ((name, getattr(self, name)) for name in counts)
            ),
        ]

    def sentence_tokens(self, device: torch.device) -> int:
        """Padded source tokens of a batch, its sentences counted once."""
        hypotheses = self.nbest if self.sample else self.beam
        if self.batch_tokens is not None:
            return self.batch_tokens // hypotheses
        if device.type != "cpu":
            return DEFAULT_BATCH_TOKENS_DEVICE // hypotheses
        return min(DEFAULT_BATCH_TOKENS // hypotheses, MOST_SOURCE_TOKENS)

    def lines_ahead(self) -> int:
        """Lines of one window."""
        if self.window is not None:
            return self.window
        if self.batch_size is None:
            return DEFAULT_WINDOW
        wanted = 1 if self.batch_size == 1 else max(DEFAULT_WINDOW, 8 * self.batch_size)
        return min(wanted, sys.maxsize)


@dataclass(frozen=True, slots=True)
class Line:
    """One input line and what its translation must begin with."""

    number: int  # from 1
    text: str
    prefix: str


def numbered_lines(lines: Iterable[str], prefixes: Iterable[str] | None) -> Iterator[Line]:
    """Number the lines from 1 and give each its prefix.

    A line feed at the end of a line, which an open text file leaves there, is no part of it.
    """
    if isinstance(lines, str) or isinstance(prefixes, str):
        raise TypeError("translate wants a list of lines, not one string: write [text].")
    lines = (text.removesuffix("\n") for text in lines)
    if prefixes is None:
        for number, text in enumerate(lines, 1):
            yield Line(number, text, "")
        return
    number, others = 0, iter(prefixes)
    for number, text in enumerate(lines, 1):
        prefix = next(others, None)
        if prefix is None:
            count = "1 prefix" if number == 2 else f"{number - 1} prefixes"
            more = "1 or more source lines" if number == 1 else f"{number} or more source lines"
            raise PrefixCountError(
                f"Only {count} for {more}; give one line per source line, blank for none."
            )
        yield Line(number, text, prefix)
    if next(others, None) is not None:
        lines_read = "1 source line" if number == 1 else f"{number} source lines"
        raise PrefixCountError(
            f"More prefixes than the {lines_read}; give one line per source line."
        )


def sentence_pairs(pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """The pairs themselves; TypeError where a string would be taken apart into its letters."""
    if isinstance(pairs, str):
        raise TypeError("score wants a list of (source, target) pairs, not one string.")
    for pair in pairs:
        if isinstance(pair, str):
            raise TypeError("score wants a list of (source, target) pairs: write [(text, text)].")
        yield pair


def cut_ids(ids: Sequence[int], limit: int | None) -> tuple[list[int], bool]:
    """The ids with EOS, cut to exactly `limit` with EOS last; and whether they were cut."""
    if limit is not None and len(ids) + 1 > limit:
        return [*ids[: limit - 1], EOS_ID], True
    return [*ids, EOS_ID], False


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Integer tensor [B, longest], filled up with padding."""
    width = max(map(len, rows))
    filled = [[*row, *[PAD_ID] * (width - len(row))] for row in rows]
    return torch.tensor(filled, dtype=torch.int64, device=device)


def batches(
    order: Sequence[int], lengths: Sequence[int], *, tokens: int, size: int | None = None
) -> Iterator[list[int]]:
    """Cut `order`, which goes from long to short, into batches.

    Each has `size` members, or as many as hold `tokens` with padding; at least one.
    """
    at = 0
    while at < len(order):
        rows = size or max(1, tokens // lengths[order[at]])
        yield list(order[at : at + rows])
        at += rows


def in_halves(
    work: Callable[[Sequence[Item]], list[Result]],
    items: Sequence[Item],
    too_large: Callable[[Item], Exception],
) -> list[Result]:
    """work(items), one result for each; in halves where they do not fit into memory together.

    Raises what `too_large` makes of an item that does not fit alone.
    """
    try:
        return work(items)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        if len(items) == 1:
            raise too_large(items[0]) from error
    # Outside the handler, whose traceback would keep the tensors alive.
    half = len(items) // 2
    return in_halves(work, items[:half], too_large) + in_halves(work, items[half:], too_large)


def split_sentences(text: str, tokenizer: Tokenizer, longest: int) -> list[list[int]]:
    """Ids of the parts of a text that end at sentence ends, as few parts as hold `longest` each.

    A sentence that is longer stays whole; then so does its part.
    """
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    edges = sorted({0, len(text), *ends})
    sentences = [text[a:b] for a, b in itertools.pairwise(edges)]
    # A part loses the space before it, and a word without its space may be more subwords.
    firsts = tokenizer.encode_batch([sentence.strip() for sentence in sentences])
    parts: list[str] = []
    length = 0
    for sentence, ids, first in zip(
        sentences, tokenizer.encode_batch(sentences), firsts, strict=True
    ):
        if parts and length + len(ids) <= longest:
            parts[-1] += sentence
            length += len(ids)
        else:
            parts.append(sentence)
            length = len(first)
    kept = [part.strip() for part in parts if part.strip()]
    return tokenizer.encode_batch(kept if len(kept) > 1 else [text])
