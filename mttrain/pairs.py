"""Parallel text wherever it lies: two files, or one file that holds both sides.

Besides two files of lines (module corpus) there are tables of tab-separated columns, JSON lines,
and translation memories (TMX 1.1 to 1.4); each plain or gzip, read as a stream. A pair is one line
on each side whatever the file holds: line breaks inside a text become spaces. TMX is XML by
strangers: nothing outside the file is read, entities are refused, depth and text are limited by
libxml2. A translation unit without one of the two languages gives a pair that is blank there, so
that it is counted with the blank ones rather than lost.

Price: JSON lines take twice the time of two files, TMX some ten times (a million units a minute).
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mttrain.corpus import Pair, TextPath, file_key, read_lines, read_pairs, reading
from mttrain.dataconfig import PAIRS_FORMS, TEST_SET, CorpusConfig, DataConfig, Fields, pairs_kind
from mttrain.errors import ConfigError, DataError
from mttrain.languages import base_code
from mttrain.shards import matching
from mttrain.testsets import public_test_set

_BREAK = re.compile(r"[^\S\n\r]*[\n\r]\s*")
# What these TMX elements hold is code of the original document, not text (TMX 1.4b, section 4).
_CODE = frozenset({"bpt", "ept", "it", "ph", "ut", "sub"})
_XML_LANG = "{http://www.w3.org/XML/1998/namespace}lang"
_JSON_FIELDS = (("source", "target"), ("src", "tgt"), ("src", "ref"), ("src", "trg"))


@dataclass(frozen=True, slots=True)
class ParallelText:
    """A parallel corpus: its files, and how pairs are read from them.

    Where it has several shards, `files` are those of the first; all are read one after the other.
    """

    files: tuple[str, ...]  # source and target, or the one file of pairs
    langs: tuple[str, str]
    fields: Fields | None = None
    weight: float = 1.0
    tag: str | None = None  # name of the token before each encoded source; not in the text
    more: tuple[tuple[str, ...], ...] = ()  # the files of each further shard

    @property
    def name(self) -> str:
        """For messages."""
        first = " and ".join(self.files)
        return f"{first} and {len(self.more)} more shards" if self.more else first

    def shards(self) -> list[ParallelText]:
        """The same text, each shard alone."""
        return [replace(self, files=files, more=()) for files in (self.files, *self.more)]

    def all_files(self) -> list[str]:
        """The files of all shards."""
        return [*self.files, *(name for files in self.more for name in files)]

    def pairs(self) -> Iterator[Pair]:
        """Yield all pairs in order; `line` counts from 1 in each shard, in TMX files the
        translation units.

        DataError: files missing, not UTF-8, out of step, without the fields or languages wanted.
        """
        if self.more:
            return itertools.chain.from_iterable(shard.pairs() for shard in self.shards())
        if len(self.files) == 2:
            return read_pairs(*self.files)
        (path,) = self.files
        kind = pairs_kind(path)
        if kind == "tmx":
            return _tmx_pairs(path, self.langs)
        reader = _tsv_pairs if kind == "tsv" else _json_pairs
        return reader(path, self.fields, self.langs)

    def required_pairs(self) -> Iterator[Pair]:
        """`pairs`, and DataError at the end when there was none."""
        pair = None
        for pair in self.pairs():
            yield pair
        if pair is None:
            raise self.without_pairs()

    def without_pairs(self) -> DataError:
        """What is to be raised when there is not one pair."""
        empty = "are empty" if len(self.all_files()) > 1 else "is empty"
        return DataError(f"{self.name} {empty}; give files with text.")

    def side(self, side: str) -> Iterator[str]:
        """The lines of "source" or "target" alone."""
        if self.more:
            for shard in self.shards():
                yield from shard.side(side)
        elif len(self.files) == 2:
            yield from read_lines(self.files[side == "target"])
        else:
            yield from (getattr(pair, side) for pair in self.pairs())

    def identity(self) -> list[Any]:
        """Plain values that change whenever other pairs could be read."""
        keys: list[Any] = [file_key(path) for path in self.all_files()]
        if len(self.files) == 1:
            keys += [list(self.langs), list(self.fields or ())]
        return keys if self.tag is None else [*keys, {"tag": self.tag}]


def parallel_text(corpus: CorpusConfig, data: DataConfig) -> ParallelText:
    """The text that a corpus of the configuration names, in its own languages.

    A public test set may be fetched.
    """
    langs = data.langs_of(corpus)
    if corpus.pairs is None:
        assert corpus.source is not None and corpus.target is not None  # held by its own checks
        first, *more = zip(*matching([corpus.source, corpus.target]), strict=True)
        text = ParallelText(first, langs, more=tuple(more))
    else:
        (found,) = matching([corpus.pairs])
        text = pairs_file(found[0], langs, corpus.fields)
        text = replace(text, more=tuple((name,) for name in found[1:]))
    return replace(text, weight=corpus.weight, tag=data.tag_of(corpus))


def pairs_file(name: str, langs: tuple[str, str], fields: Fields | None = None) -> ParallelText:
    """The text that a value of `pairs` names; of a test set with several references the first."""
    kind = pairs_kind(name)
    if kind is None:
        raise ConfigError(f"{name} is none of {PAIRS_FORMS}.")
    if kind == "sacrebleu":
        source, references = public_test_set(name.removeprefix(TEST_SET), langs)
        return ParallelText((source, references[0]), langs)
    return ParallelText((name,), langs, fields)


def _single_line(text: str) -> str:
    """Line breaks, with the white space around them, as one space; other text stays as it is."""
    return _BREAK.sub(" ", text.strip("\n\r")) if "\n" in text or "\r" in text else text


# ---- tables -----------------------------------------------------------------------------------


def _tsv_pairs(path: TextPath, fields: Fields | None, langs: tuple[str, str]) -> Iterator[Pair]:
    """Two columns of a table; quotes are text."""
    lines: Iterator[tuple[int, str]] = enumerate(read_lines(path), 1)
    if fields is None:
        lines = _two_columns(lines, path)
    one, two = fields or (1, 2)
    if isinstance(one, str) and isinstance(two, str):
        _, header = next(lines, (1, ""))
        names = header.split("\t")
        missing = [name for name in (one, two) if name not in names]
        if missing:
            raise DataError(
                f"{path}, line 1: no column is named {missing[0]!r}; the first line holds "
                f"{', '.join(names)[:200]}."
            )
        one, two = names.index(one) + 1, names.index(two) + 1
    assert isinstance(one, int) and isinstance(two, int)  # held by CorpusConfig's own checks
    for number, line in lines:
        columns = line.split("\t")
        if len(columns) < max(one, two):
            raise DataError(
                f"{path}, line {number}: {len(columns)} of the tab-separated columns, but column "
                f"{max(one, two)} is wanted."
            )
        yield Pair(number, _single_line(columns[one - 1]), _single_line(columns[two - 1]))


def _two_columns(lines: Iterator[tuple[int, str]], path: TextPath) -> Iterator[tuple[int, str]]:
    """The lines, if the first has no more columns than two: which ones would be a guess."""
    for number, line in lines:
        count = line.count("\t") + 1
        if number == 1 and count > 2:
            raise DataError(
                f"{path}, line 1: {count} columns; say which are source and target, such as "
                "fields: [1, 2] (--fields 1,2)."
            )
        yield number, line


# ---- JSON lines -------------------------------------------------------------------------------


def _json_pairs(path: TextPath, fields: Fields | None, langs: tuple[str, str]) -> Iterator[Pair]:
    """Two texts of each object; lines without anything are passed over."""
    names: Sequence[str] | None = None if fields is None else [str(field) for field in fields]
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {number}: no valid JSON: {str(error)[:100]}.") from None
        if not isinstance(content, dict):
            raise DataError(f"{path}, line {number}: no JSON object.")
        if names is None:
            names = _json_names(content, langs)
        if names is None:
            raise DataError(
                f"{path}, line {number}: which of {', '.join(content)[:200]} are source and "
                "target? Name them with fields: [NAME, NAME]."
            )
        texts = [_json_text(content, name, f"{path}, line {number}") for name in names]
        yield Pair(number, *map(_single_line, texts))


def _json_names(content: Mapping[str, Any], langs: tuple[str, str]) -> Sequence[str] | None:
    """The names that the first object has: language codes, or the usual words."""
    nested = tuple(f"translation.{lang}" for lang in langs)
    for names in (langs, *_JSON_FIELDS, nested):
        if all(_json_value(content, name) is not None for name in names):
            return names
    return None


def _json_value(content: Mapping[str, Any], name: str) -> Any:
    """The value of a name, or of a dotted path of names; None where there is none."""
    value: Any = content
    for part in [name] if name in content else name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _json_text(content: Mapping[str, Any], name: str, place: str) -> str:
    value = _json_value(content, name)
    if not isinstance(value, str):
        found = "is missing" if value is None else "holds no text"
        raise DataError(f"{place}: {name!r} {found}.")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(f"{place}: {name!r} holds half a character (a lone surrogate).") from None
    return value


# ---- translation memories ---------------------------------------------------------------------


def _tmx_pairs(path: TextPath, langs: tuple[str, str]) -> Iterator[Pair]:
    """The two languages of each translation unit."""
    from lxml import etree

    number, complete = 0, False
    seen: dict[str, None] = {}
    try:
        with reading(path, lambda: f"translation unit {number}") as stream:
            units = etree.iterparse(
                stream, tag="{*}tu", resolve_entities=False, load_dtd=False, no_network=True
            )
            for _, unit in units:
                number += 1
                variants = _variants(unit, f"{path}, translation unit {number}")
                seen.update(dict.fromkeys(variants))
                source, target = (_variant(variants, lang, langs) for lang in langs)
                complete = complete or (source is not None and target is not None)
                yield Pair(number, source or "", target or "")
                _forget(unit)
    except etree.XMLSyntaxError as error:
        place = f"line {error.lineno}" if error.lineno else f"after translation unit {number}"
        raise DataError(f"{path}, {place}: no valid XML: {error.msg}.") from None
    if number and not complete:
        raise DataError(
            f"{path}: no translation unit has both {langs[0]} and {langs[1]}; the languages there "
            f"are {', '.join(seen)[:200] or 'not named'}."
        )


def _variants(unit: Any, place: str) -> dict[str, str]:
    """Language code as written -> text of its first variant in a unit."""
    found: dict[str, str] = {}
    for variant in unit.iterfind("{*}tuv"):
        lang = variant.get(_XML_LANG) or variant.get("lang") or ""
        segment = variant.find("{*}seg")
        if segment is not None:
            found.setdefault(lang, _single_line(_segment_text(segment, place)))
    return found


def _segment_text(element: Any, place: str) -> str:
    """The text of a segment without the codes of its original format; that of <hi> stays."""
    from lxml import etree

    parts = [element.text or ""]
    for child in element:
        if isinstance(child, etree._Entity):
            name = child.text[:40]
            raise DataError(f"{place}: it holds the entity {name}; write the text itself.")
        if isinstance(child.tag, str) and etree.QName(child).localname not in _CODE:
            parts.append(_segment_text(child, place))
        parts.append(child.tail or "")
    return "".join(parts)


def _variant(variants: Mapping[str, str], lang: str, langs: tuple[str, str]) -> str | None:
    """The text in a language: of the very code, else of one that differs in region or script.

    "pt" finds "pt-BR"; but where both sides are kinds of one language the codes must be equal.
    """
    plain = {code.lower().replace("_", "-"): text for code, text in variants.items()}
    exact = plain.get(lang.lower().replace("_", "-"))
    if exact is not None or base_code(langs[0]) == base_code(langs[1]):
        return exact
    return next((text for code, text in plain.items() if base_code(code) == base_code(lang)), None)


def _forget(unit: Any) -> None:
    """Free a unit and what stands before it, so that memory does not grow with the file."""
    unit.clear()
    while unit.getprevious() is not None:
        del unit.getparent()[0]
