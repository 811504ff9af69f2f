"""How a vocabulary cuts a text, in numbers: what `mttrain tokenize` prints."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mttrain.corpus import in_blocks
from mttrain.tokenizer import BLOCK, Tokenizer


@dataclass(frozen=True)
class TokenizerReport:
    """How a tokenizer cuts a text. Words are runs without white space."""

    size: int
    lines: int
    words: int
    characters: int
    tokens: int
    longest_tokens: int
    longest_line: int  # its number, from 1; 0 for a text without lines
    failures: int  # lines that do not come back from encoding and decoding; must be 0

    @property
    def tokens_per_word(self) -> float:
        return self.tokens / max(self.words, 1)

    @property
    def tokens_per_character(self) -> float:
        return self.tokens / max(self.characters, 1)

    def text(self, longest: str | None = None) -> str:
        """Five lines for the terminal; `longest` names the longest line, if not by number alone."""
        return "\n".join(
            (
                f"vocabulary   {self.size} tokens",
                f"text         {self.lines} lines, {self.words} words, {self.tokens} tokens",
                f"fertility    {self.tokens_per_word:.3f} tokens per word, "
                f"{self.tokens_per_character:.3f} per character",
                f"longest      {self.longest_tokens} tokens "
                f"({longest or f'line {self.longest_line}'})",
                f"round trip   {self.failures} lines changed",
            )
        )


def tokenizer_report(tokenizer: Tokenizer, lines: Iterable[str]) -> TokenizerReport:
    """Encode and decode all lines and count; streams, at about half of encoding speed."""
    counts = {"lines": 0, "words": 0, "characters": 0, "tokens": 0, "failures": 0}
    longest, longest_line = 0, 0
    for block in in_blocks(lines, BLOCK):
        for text, ids in zip(block, tokenizer.encode_batch(block), strict=True):
            counts["lines"] += 1
            counts["words"] += len(text.split())
            counts["characters"] += len(text)
            counts["tokens"] += len(ids)
            counts["failures"] += tokenizer.decode(ids) != text
            if len(ids) > longest or longest_line == 0:
                longest, longest_line = len(ids), counts["lines"]
    return TokenizerReport(
        size=tokenizer.size, longest_tokens=longest, longest_line=longest_line, **counts
    )
