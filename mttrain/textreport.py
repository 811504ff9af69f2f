"""What a check of parallel text found, as values for JSON and as lines for people.

`Finding` is one kind of trouble in one corpus; `TextReport` is all that is to be said of a corpus.
`file_findings` looks at the bytes of a file, before anything is made of them: UTF-8, line ends,
number of lines. Price: reading the file once, some 100 MB/s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mttrain.check import PERCENTILES
from mttrain.corpus import reading
from mttrain.textrules import RULES, Level, excerpt

NAMED = 5  # line numbers of a finding
SIDES = ("source", "target")


@dataclass(slots=True)
class Finding:
    """One kind of trouble in one corpus: how often, where first, and an example."""

    kind: str
    side: str | None = None  # None: of both together
    count: int = 0
    of: int = 0  # lines or pairs that were looked at
    lines: list[int] = field(default_factory=list)  # the first ones, from 1
    example: dict[str, Any] | None = None  # line, and source or target or both, shortened
    detail: str = ""  # what the rule does not say by itself

    def note(self, line: int, example: Callable[[], dict[str, str]]) -> None:
        """Count one more."""
        self.count += 1
        if len(self.lines) < NAMED:
            self.lines.append(line)
        if self.example is None:
            self.example = {"line": line, **example()}

    @property
    def level(self) -> Level:
        return RULES[self.kind].level

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        rule = RULES[self.kind]
        plain: dict[str, Any] = {"kind": self.kind, "level": rule.level, "side": self.side}
        plain |= {"count": self.count, "of": self.of, "share": self.count / max(self.of, 1)}
        plain |= {"lines": self.lines, "example": self.example, "what": rule.what}
        return plain | {"detail": self.detail, "advice": rule.advice}

    def text(self) -> str:
        """Two or three lines: what and where, an example, what to do."""
        rule = RULES[self.kind]
        side = f"{self.side}: " if self.side else ""
        detail = f"; {self.detail}" if self.detail else ""
        lines = [f"{rule.level}: {side}{self._counted()}{rule.what}{detail}{self._where()}"]
        if self.example is not None:
            shown = [f'"{text}"' for name, text in self.example.items() if name != "line"]
            lines.append(f"    line {self.example['line']}: {' | '.join(shown)}")
        lines.append(f"    {rule.advice}")
        return "\n".join(lines)

    def _counted(self) -> str:
        if not self.count:
            return ""
        return f"{self.count:,} of {self.of:,} ({100 * self.count / max(self.of, 1):.3g} %) "

    def _where(self) -> str:
        if not self.lines:
            return ""
        more = f" and {self.count - len(self.lines):,} more" if self.count > len(self.lines) else ""
        return f": line {', '.join(map(str, self.lines))}{more}"


@dataclass(frozen=True)
class TextReport:
    """What was found in one corpus. lengths: PERCENTILES, by name; empty without pairs."""

    name: str
    role: str  # "training", "validation" or "test"
    pairs: int
    lengths: dict[str, list[int]]
    findings: list[Finding]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        plain = {"name": self.name, "role": self.role, "pairs": self.pairs, "lengths": self.lengths}
        return {**plain, "findings": [finding.to_dict() for finding in self.findings]}

    def text(self) -> str:
        """For people: the size, the lengths, the findings."""
        lines = [f"{self.role}: {self.name}: {self.pairs:,} pairs"]
        if self.lengths:
            heads = "".join(f"{f'{percentile} %':>8}" for percentile in PERCENTILES)
            lines.append(f"    {'up to this length':<22}{heads}")
        for name, values in self.lengths.items():
            lines.append(f"    {name:<22}" + "".join(f"{value:>8}" for value in values))
        lines += [finding.text() for finding in self.findings]
        return "\n".join(lines if self.findings else [*lines, "nothing found"])


# ---- files ------------------------------------------------------------------------------------


def file_findings(path: str) -> tuple[int, list[Finding]]:
    """The number of lines of a file, and what is wrong with its bytes.

    DataError when it cannot be read.
    """
    bad, crlf = Finding("not_utf8"), Finding("crlf")
    number = offset = 0
    with reading(path, lambda: f"line {number}") as stream:
        for raw in stream:
            number += 1
            if raw.endswith(b"\r\n"):
                crlf.note(number, dict)
            if not raw.isascii():
                try:
                    raw.decode("utf-8")
                except UnicodeDecodeError as error:
                    if not bad.count:
                        byte = raw[error.start]
                        bad.detail = f"first: byte 0x{byte:02x} at offset {offset + error.start}"
                    bad.note(number, lambda raw=raw: {"text": _shown(raw)})  # type: ignore[misc]
            offset += len(raw)
    crlf.example = None  # the end of a line is nothing to be shown
    bad.of = crlf.of = number
    return number, [finding for finding in (bad, crlf) if finding.count]


def _shown(raw: bytes) -> str:
    """A line that is not UTF-8, its odd bytes spelled out."""
    text = raw.rstrip(b"\r\n").decode("utf-8", errors="backslashreplace")
    return excerpt(text, max(0, text.find("\\x")))


def unequal(counts: dict[str, int]) -> Finding:
    """The finding that the files of a corpus have these different numbers of lines."""
    counted = " and ".join(f"{name} has {count:,}" for name, count in counts.items())
    return Finding("unequal", detail=counted)
