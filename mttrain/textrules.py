"""What a careful reader would object to in parallel text: the names, the tests, and the remedies.

`RULES` holds one entry for each kind of finding, in the order of a report: how grave it is, what it
is called, and what to do about it. `line_faults` looks at one side of a pair, `pair_faults` at both
together; each yields kinds with the place where the trouble begins. A fault here is a sign that can
be read from the text alone, without knowing the languages.

Price: some 5 microseconds a pair. Plain ASCII passes by most tests, since what they look for lies
beyond it.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from mttrain.corpus import Pair

Level = Literal["error", "warning", "note"]
Find = Callable[[str], int]
"""Where in a line the trouble begins; -1: there is none."""

MOST_CHARACTERS = 2000  # of a line; a sentence has some hundred
_SHOWN = 70  # characters of an example


class Rule(NamedTuple):
    """One kind of finding. error: training would refuse; warning: look at it; note: know of it."""

    level: Level
    what: str
    advice: str


RULES: dict[str, Rule] = {
    "unequal": Rule(
        "error",
        "the two sides have different numbers of lines",
        "Line n of one must translate line n of the other: find where they part, for instance at a "
        "line that was lost or split.",
    ),
    "not_utf8": Rule(
        "error",
        "lines that are not UTF-8",
        "Correct the lines, or convert the file: iconv -f ENCODING -t UTF-8.",
    ),
    "empty": Rule("error", "no lines at all", "Give files with text."),
    "language": Rule(
        "warning",
        "text that looks like another language than the one it is said to be",
        "Are source and target swapped, or the language codes?",
    ),
    "same_language": Rule(
        "warning",
        "the same words on both sides, as if both were one language",
        "Is one file the translation of the other, or a copy of it?",
    ),
    "swapped": Rule(
        "warning",
        "pairs whose sides look swapped",
        "Swap them back, or remove them: the model would learn to mix both directions.",
    ),
    "untranslated": Rule(
        "warning",
        "lines that look like the language of the other side",
        "Remove these pairs: the model would learn to copy instead of translating.",
    ),
    "blank": Rule(
        "warning",
        "pairs that are blank on one side or both",
        "Training skips them; a whole region of them means that the files are out of step.",
    ),
    "overlap": Rule(
        "warning",
        "lines whose source is also in the training text",
        "Remove them from the training text: scores on what was trained on say little.",
    ),
    "identical": Rule(
        "warning",
        "pairs with the same text on both sides",
        "A few names and numbers are fine; many teach the model to copy.",
    ),
    "duplicate": Rule(
        "note", "pairs that repeat an earlier one", "data.drop_duplicates: true uses them once."
    ),
    "several_targets": Rule(
        "note",
        "pairs whose source came before with another target",
        "Variants are fine; a source with dozens of targets (a menu, a heading) is not.",
    ),
    "several_sources": Rule(
        "note",
        "pairs whose target came before with another source",
        "Variants are fine; one target for many sources is the sign of a placeholder.",
    ),
    "ratio": Rule(
        "warning",
        "pairs whose sides have very different lengths in characters",
        "Look whether they translate each other; data.max_ratio leaves such pairs out.",
    ),
    "subword_ratio": Rule(
        "warning",
        "pairs beyond the ratio of lengths in subwords",
        "Training leaves them out; look whether they translate each other.",
    ),
    "too_long": Rule(
        "warning",
        "pairs with more subwords on a side than --max-length",
        "Training leaves them out whole; split them into sentences, or raise data.max_length.",
    ),
    "long_line": Rule(
        "warning",
        f"lines of more than {MOST_CHARACTERS:,} characters",
        "Split them into sentences on both sides; base64 and tables belong removed.",
    ),
    "numbers": Rule(
        "note",
        "pairs with a number of two digits or more on one side only",
        "A few write numbers as words; many mean that the files are out of step.",
    ),
    "urls": Rule(
        "note",
        "pairs whose web or mail addresses differ",
        "Look whether the pairs translate each other.",
    ),
    "no_letters": Rule(
        "warning",
        "pairs with words on one side and no letter on the other",
        "Remove them: they do not translate each other.",
    ),
    "mojibake": Rule(
        "warning",
        "lines with UTF-8 that was read as Latin-1 or Windows-1252, such as Ã¤ for ä",
        "Repair them: text.encode('cp1252').decode('utf-8') in Python.",
    ),
    "replacement": Rule(
        "warning",
        "lines with U+FFFD, the sign for bytes that could not be read",
        "Make the text again from its source with the right encoding, or remove the pairs.",
    ),
    "control": Rule(
        "warning",
        "lines with control characters",
        "Remove them; those from U+0080 to U+009F are Windows-1252 read as Latin-1.",
    ),
    "separator": Rule(
        "warning",
        "lines with characters that other programs take for line ends",
        "Replace them by spaces: other tools would see more lines, and lose step.",
    ),
    "bom": Rule(
        "warning",
        "lines with a byte order mark (U+FEFF) inside the text",
        "Remove it; it comes from joining files that each began with one.",
    ),
    "tab": Rule(
        "warning", "lines with a tab", "Replace it by a space, or is this a table (a .tsv file)?"
    ),
    "invisible": Rule(
        "note",
        "lines with invisible characters: soft hyphens, zero-width spaces, writing directions",
        "Remove what the language does not need: they make other words of the same letters.",
    ),
    "private_use": Rule(
        "warning",
        "lines with characters of a private use area",
        "They belong to one font, mostly from a PDF file; remove or replace them.",
    ),
    "entity": Rule(
        "warning",
        "lines with HTML entities, such as &amp; or &#39;",
        "Unescape them on both sides: html.unescape in Python.",
    ),
    "markup": Rule(
        "warning", "lines with markup, such as <b>", "Remove the tags, or keep them on both sides."
    ),
    "subword_marks": Rule(
        "warning",
        "lines that were cut into subwords (@@ or ▁)",
        "Give the raw text: mttrain learns its own vocabulary.",
    ),
    "tokenized": Rule(
        "warning",
        "lines with a space before a period or a comma, as tokenized text has",
        "Give the text as people write it: mttrain needs no tokenizing, and output would need "
        "detokenizing.",
    ),
    "lowercased": Rule(
        "warning",
        "lines in lower case: nearly all of the text",
        "Give the text as people write it: output would come in lower case, too.",
    ),
    "not_nfc": Rule(
        "note",
        "lines with decomposed letters (Unicode NFD), which look like composed ones (NFC)",
        "Normalise both sides, and all later input: uconv -x any-nfc.",
    ),
    "crlf": Rule(
        "note", "lines that end in CR LF, as on Windows", "No harm here: mttrain drops the CR."
    ),
    "outer_space": Rule(
        "note",
        "lines that begin or end with white space",
        "Remove it on both sides: it costs subwords and is learned.",
    ),
}


# ---- one side ---------------------------------------------------------------------------------


def _pattern(pattern: str) -> Find:
    search = re.compile(pattern).search

    def find(text: str) -> int:
        found = search(text)
        return -1 if found is None else found.start()

    return find


_entity = _pattern(r"&(?:[A-Za-z][A-Za-z0-9]{1,10}|#\d{1,7}|#[xX][0-9A-Fa-f]{1,6});")
_markup = _pattern(r"</?[A-Za-z][A-Za-z0-9]{0,10}(?:\s[^<>]{0,300})?/?>|<!--")
_marks = _pattern(r"\S@@(?: |$)|(?:^| )▁\S")
# Lead bytes of two-byte letters as Latin-1 shows them, then what can only follow one. Closing
# quotes are left out: "Ã”" may end a Portuguese word in capitals.
_mojibake = _pattern(
    r"[ÃÂ][\x80-\xbf‚ƒ„…†‡ˆ‰Š‹ŒŽšœžŸ€™]|â€[\x80-\xbf˜™œž“”¦¢\xa0]|Ð[\x80-\xbf]Ð|ï»¿"
)


def _outer_space(text: str) -> int:
    bare = text.strip()
    if bare in (text, ""):  # a blank line is counted as such
        return -1
    return 0 if text[:1].isspace() else len(text)


def _too_long(text: str) -> int:
    return 0 if len(text) > MOST_CHARACTERS else -1


def _not_nfc(text: str) -> int:
    if unicodedata.is_normalized("NFC", text):
        return -1
    return next((i for i, c in enumerate(text) if unicodedata.combining(c)), 0)


_ALWAYS: tuple[tuple[str, Find], ...] = (
    ("long_line", _too_long),
    ("entity", lambda text: _entity(text) if "&" in text else -1),
    ("markup", lambda text: _markup(text) if "<" in text else -1),
    ("subword_marks", lambda text: _marks(text) if "@@" in text or "▁" in text else -1),
    ("outer_space", _outer_space),
)
_BEYOND_ASCII: tuple[tuple[str, Find], ...] = (
    ("mojibake", _mojibake),
    ("replacement", lambda text: text.find("\ufffd")),
    ("not_nfc", _not_nfc),
)
_UNPRINTABLE: tuple[tuple[str, Find], ...] = (
    ("control", _pattern(r"[\x00-\x08\x0e-\x1b\x1f\x7f-\x84\x86-\x9f]")),
    ("separator", _pattern(r"[\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")),
    ("bom", lambda text: text.find("\ufeff")),
    ("tab", lambda text: text.find("\t")),
    ("invisible", _pattern("[\xad\u061c\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069]")),
    ("private_use", _pattern("[\ue000-\uf8ff\U000f0000-\U0010ffff]")),
)


def line_faults(text: str) -> Iterator[tuple[str, int]]:
    """(kind, where it begins) for each fault of one line."""
    groups = [_ALWAYS]
    if not text.isascii():
        groups.append(_BEYOND_ASCII)
    if not text.isprintable():  # controls, odd spaces, and what has no shape
        groups.append(_UNPRINTABLE)
    for group in groups:
        for kind, find in group:
            at = find(text)
            if at >= 0:
                yield kind, at


# ---- both sides -------------------------------------------------------------------------------

_ADDRESS = re.compile(r"(?:https?://|www\.)[^\s<>\"]+|[\w.+-]+@[\w-]+\.[\w.-]+")
_GROUPED = re.compile(r"(?<=\d)[.,'’ \xa0\u2009\u202f](?=\d{3}(?!\d))")  # 10,000 and 10 000
_NUMBER = re.compile(r"(?<!\d)\d{2,18}(?!\d)")
_DIGITS = re.compile(r"\d\d")
_LETTER = re.compile(r"[^\W\d_]")
_WORD = re.compile(r"[^\W\d_]{3}")


def pair_faults(pair: Pair) -> Iterator[str]:
    """The kinds of fault that only both sides together show; the pair is not blank."""
    source, target = pair.source, pair.target
    if source == target:
        yield "identical"
        return
    if ("/" in source or "/" in target or "@" in source or "@" in target) and (
        _addresses(source) != _addresses(target)
    ):
        yield "urls"
    if (_DIGITS.search(source) or _DIGITS.search(target)) and numbers(source) != numbers(target):
        yield "numbers"
    for one, other in ((source, target), (target, source)):
        if _LETTER.search(one) is None and _WORD.search(other) is not None:
            yield "no_letters"


def numbers(text: str) -> set[int]:
    """The numbers of two digits or more; signs that group thousands do not count, and what stands
    around a decimal sign counts as two numbers, so that 1,234.56 and 1.234,56 are the same."""
    return {int(digits) for digits in _NUMBER.findall(_GROUPED.sub("", text))}


def _addresses(text: str) -> set[str]:
    return {found.rstrip(".,;:!?)]}»”'/").lower() for found in _ADDRESS.findall(text)}


# ---- examples ---------------------------------------------------------------------------------


def excerpt(text: str, at: int = 0) -> str:
    """The part of a line around `at`, in one line, with all that has no shape spelled out."""
    begin = max(0, min(at - _SHOWN // 2, len(text) - _SHOWN))
    part = text[begin : begin + _SHOWN]
    shown = "".join(c if c.isprintable() else _spelled(c) for c in part)
    before, after = "…" if begin else "", "…" if begin + _SHOWN < len(text) else ""
    return f"{before}{shown}{after}"


def _spelled(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
