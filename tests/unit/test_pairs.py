"""Parallel text in one file: tables, JSON lines, translation memories, public test sets."""

from __future__ import annotations

import gzip
import json
import tracemalloc
import xml.etree.ElementTree as ET
from pathlib import Path
from xml.sax.saxutils import escape

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mttrain.config import CorpusConfig, DataConfig
from mttrain.corpus import Pair
from mttrain.errors import ConfigError, DataError
from mttrain.pairs import ParallelText, pairs_file, parallel_text
from mttrain.testsets import public_test_set

EN_DE = ("en", "de")


def read(path: Path, fields: object = None, langs: tuple[str, str] = EN_DE) -> list[Pair]:
    return list(pairs_file(str(path), langs, fields).pairs())  # type: ignore[arg-type]


def written(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def tmx(units: str, head: str = "") -> str:
    return (
        f'<?xml version="1.0" encoding="UTF-8"?>\n{head}<tmx version="1.4"><header srclang="en"/>'
        f"<body>{units}</body></tmx>"
    )


def unit(**texts: str) -> str:
    inner = "".join(
        f'<tuv xml:lang="{lang.replace("_", "-")}"><seg>{text}</seg></tuv>'
        for lang, text in texts.items()
    )
    return f"<tu>{inner}</tu>"


# ---- tables ------------------------------------------------------------------------------------


def test_columns_of_a_table(tmp_path: Path) -> None:
    """Quotes and other separators of lines are text; further columns are passed over."""
    path = written(tmp_path / "a.tsv", 'a "x\tb\u2028b\r\n\tonly target\n,;\t\t0.9\n')
    assert read(path) == [
        Pair(1, 'a "x', "b\u2028b"),
        Pair(2, "", "only target"),
        Pair(3, ",;", ""),
    ]
    path = written(tmp_path / "b.tsv", "0.5\thello\thallo\n")
    assert read(path, (2, 3)) == [Pair(1, "hello", "hallo")]
    assert read(path, (3, 2)) == [Pair(1, "hallo", "hello")]


def test_columns_by_the_names_of_the_first_line(tmp_path: Path) -> None:
    path = written(tmp_path / "a.tsv", "id\tde\ten\n1\tHallo\thello\n")
    assert read(path, ("en", "de")) == [Pair(2, "hello", "Hallo")]
    with pytest.raises(DataError, match=r"a\.tsv, line 1: no column is named 'fr'.*id, de, en"):
        read(path, ("fr", "de"))


def test_more_columns_than_two_are_no_guess(tmp_path: Path) -> None:
    """A table with numbers in front was scored as if they were the source."""
    path = written(tmp_path / "a.tsv", "17\thello\thallo\n")
    with pytest.raises(DataError, match=r"a\.tsv, line 1: 3 columns; .*--fields 1,2"):
        read(path)


def test_a_line_without_the_column_is_named(tmp_path: Path) -> None:
    """A table whose lines are cut must not lose pairs in silence."""
    path = written(tmp_path / "a.tsv", "a\tb\nc d\n")
    with pytest.raises(DataError, match=r"a\.tsv, line 2: 1 of the .* column 2 is wanted"):
        read(path)


# ---- JSON lines --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "fields"),
    [
        ({"en": "hello", "de": "hallo", "source": "web"}, None),
        ({"source": "hello", "target": "hallo"}, None),
        ({"src": "hello", "tgt": "hallo"}, None),
        ({"id": 3, "translation": {"de": "hallo", "en": "hello"}}, None),
        ({"x": {"deep": "hello"}, "y": "hallo"}, ("x.deep", "y")),
        ({"x.deep": "hello", "y": "hallo"}, ("x.deep", "y")),
    ],
)
def test_names_in_json_lines(tmp_path: Path, content: dict[str, object], fields: object) -> None:
    path = written(tmp_path / "a.jsonl", json.dumps(content) + "\n\n" + json.dumps(content))
    assert read(path, fields) == [Pair(1, "hello", "hallo"), Pair(3, "hello", "hallo")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: no valid JSON"),
        ("[" * 100_000, "line 2: no valid JSON"),
        ("[1]", "line 2: no JSON object"),
        ('{"en": "x"}', "line 2: 'de' is missing"),
        ('{"en": "x", "de": null}', "line 2: 'de' is missing"),
        ('{"en": "x", "de": 3}', "line 2: 'de' holds no text"),
        ('{"en": "x", "de": "\\ud800"}', "line 2: 'de' holds half a character"),
    ],
)
def test_wrong_json_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = written(tmp_path / "a.jsonl", '{"en": "a", "de": "b"}\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        read(path)


def test_json_without_known_names_asks_for_them(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", '{"english": "a", "german": "b"}\n')
    with pytest.raises(DataError, match=r"which of english, german .* fields"):
        read(path)


@given(st.lists(st.tuples(st.text(), st.text()), min_size=1))
def test_any_text_of_json_is_one_line(pairs: list[tuple[str, str]]) -> None:
    """A line feed inside a text put everything after it out of step."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        lines = [json.dumps({"source": s, "target": t}) for s, t in pairs]
        found = read(written(Path(folder) / "a.jsonl", "\n".join(lines)))
    assert len(found) == len(pairs)
    for pair, texts in zip(found, pairs, strict=True):
        for one, text in zip((pair.source, pair.target), texts, strict=True):
            assert "\n" not in one and "\r" not in one
            assert one.split() == text.split()
            if "\n" not in text and "\r" not in text:
                assert one == text


# ---- translation memories ----------------------------------------------------------------------


def test_units_of_a_translation_memory(tmp_path: Path) -> None:
    """Regions, namespaces, more languages, line breaks, entities of XML, codes of a document."""
    text = tmx(
        unit(de="Hallo &amp; Tsch&#252;s", en_US="hello &amp; bye", fr="salut")
        + "<tu><prop type='x'>p</prop><tuv lang='EN'><seg>old\n   way</seg></tuv>"
        "<tuv lang='DE_AT'><seg>alte <!-- c -->Art</seg></tuv></tu>"
        + unit(
            en='<bpt i="1">&lt;b&gt;</bpt>bold<ept i="1">&lt;/b&gt;</ept> and <hi>high</hi>',
            de='<ph x="1">{1}<sub>no</sub></ph>fett und <hi>hoch<it pos="end">|</it></hi>!',
        )
        + unit(en="alone"),
        head='<!DOCTYPE tmx SYSTEM "tmx14.dtd">\n',
    )
    assert read(written(tmp_path / "a.tmx", text)) == [
        Pair(1, "hello & bye", "Hallo & Tschüs"),
        Pair(2, "old way", "alte Art"),
        Pair(3, "bold and high", "fett und hoch!"),
        Pair(4, "alone", ""),
    ]


def test_utf16_and_gzip(tmp_path: Path) -> None:
    """Translation tools on Windows write UTF-16."""
    text = tmx(unit(en="hello", de="Grüße")).replace("UTF-8", "UTF-16")
    path = written(tmp_path / "a.tmx", text.encode("utf-16"))
    assert read(path) == [Pair(1, "hello", "Grüße")]
    packed = written(tmp_path / "a.tmx.gz", gzip.compress(tmx(unit(en="a", de="b")).encode()))
    assert read(packed) == [Pair(1, "a", "b")]
    cut = written(tmp_path / "cut.tmx.gz", packed.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"cut\.tmx\.gz"):
        read(cut)


def test_kinds_of_one_language(tmp_path: Path) -> None:
    """ "pt" finds any Portuguese, but between two of them the codes decide."""
    path = written(tmp_path / "a.tmx", tmx(unit(pt_BR="ônibus", pt_PT="autocarro", en="bus")))
    assert read(path, None, ("pt-PT", "pt-BR")) == [Pair(1, "autocarro", "ônibus")]
    assert read(path, None, ("en", "pt_PT")) == [Pair(1, "bus", "autocarro")]
    assert read(path, None, ("en", "pt")) == [Pair(1, "bus", "ônibus")]
    with pytest.raises(DataError, match=r"has both en and ja.*pt-BR, pt-PT, en"):
        read(path, None, ("en", "ja"))


@pytest.mark.parametrize(
    "text",
    [
        # Files outside, entities that grow, and entities at all.
        '<!DOCTYPE t [<!ENTITY x SYSTEM "file:///etc/passwd">]><tmx><body><tu><tuv xml:lang="en">'
        '<seg>&x;</seg></tuv><tuv xml:lang="de"><seg>b</seg></tuv></tu></body></tmx>',
        "<!DOCTYPE t ["
        + '<!ENTITY a0 "ha">'
        + "".join(f'<!ENTITY a{n} "{f"&a{n - 1};" * 10}">' for n in range(1, 12))
        + ']><tmx><body><tu><tuv xml:lang="en"><seg>&a11;</seg></tuv>'
        '<tuv xml:lang="de"><seg>b</seg></tuv></tu></body></tmx>',
        tmx(unit(en="<hi>" * 300 + "x" + "</hi>" * 300, de="b")),
        tmx(unit(en="a", de="b"))[:-9],
        tmx(unit(en="a\x00", de="b")),
        tmx(unit(en="a & b", de="b")),
        "no XML",
        "<html><body>nothing</body></html>",
        "",
    ],
)
def test_hostile_and_broken_xml(tmp_path: Path, text: str) -> None:
    """X06: a file of a stranger must not read other files, eat the memory, or end in silence."""
    path = written(tmp_path / "a.tmx", text)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=r"a\.tmx") as caught:
            list(ParallelText((str(path),), EN_DE).required_pairs())
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()
    assert "root:" not in str(caught.value)


def test_a_large_memory_is_streamed(tmp_path: Path) -> None:
    """The units that were read are let go: the tree of a file is ten times its size."""
    import resource

    path = written(tmp_path / "a.tmx", tmx(unit(en="a " * 400, de="b " * 400) * 40_000))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert sum(1 for _ in pairs_file(str(path), EN_DE).pairs()) == 40_000
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < path.stat().st_size / 1024 / 2  # kilobytes


@given(
    st.lists(
        st.text(st.characters(blacklist_categories=("Cs", "Cc"), blacklist_characters="￾￿")),
        min_size=2,
        max_size=2,
    )
)
def test_text_of_translation_memories_against_another_reader(texts: list[str]) -> None:
    import tempfile

    text = tmx(unit(en=escape(texts[0]), de=escape(texts[1])))
    segments = [element.text or "" for element in ET.fromstring(text.encode()).iter("seg")]
    with tempfile.TemporaryDirectory() as folder:
        (pair,) = read(written(Path(folder) / "a.tmx", text))
    assert [pair.source, pair.target] == segments == texts


# ---- configuration -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "source: is required"),
        ({"source": "a"}, "target: is required"),
        ({"pairs": "a.tsv", "source": "b"}, "remove source and target"),
        ({"pairs": "a.csv"}, "is none of"),
        ({"pairs": ".tsv"}, "is none of"),
        ({"pairs": "sacrebleu:"}, "is none of"),
        ({"source": "a", "target": "b", "fields": [1, 2]}, "has an effect only with"),
        ({"pairs": "a.tmx", "fields": ["a", "b"]}, "has an effect only with"),
        ({"pairs": "a.tsv", "fields": [0, 1]}, "counted from 1"),
        ({"pairs": "a.tsv", "fields": [1, 1]}, "for both sides"),
        ({"pairs": "a.tsv", "fields": [1, "de"]}, "two names or two numbers"),
        ({"pairs": "a.jsonl", "fields": [1, 2]}, "two names"),
    ],
)
def test_wrong_corpora_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        CorpusConfig.model_validate(values)


def test_two_files_and_one_read_alike(tmp_path: Path) -> None:
    one = written(tmp_path / "a.en", "a\nb\n")
    other = written(tmp_path / "a.de", "c\nd\n")
    table = written(tmp_path / "a.TSV.gz", gzip.compress(b"a\tc\nb\td\n"))
    data = DataConfig(
        source_lang="en",
        target_lang="de",
        train=[CorpusConfig(source=str(one), target=str(other), weight=2.0)],
        valid=CorpusConfig(pairs=str(table)),
    )
    texts = [parallel_text(corpus, data) for corpus in (data.train[0], data.valid)]
    assert list(texts[0].pairs()) == list(texts[1].pairs())
    for side in ("source", "target"):
        assert list(texts[0].side(side)) == list(texts[1].side(side))
    assert texts[0].weight == 2.0
    # What a store is known by changes with whatever decides the pairs.
    changed = ParallelText(texts[1].files, EN_DE, (2, 1))
    turned = ParallelText(texts[1].files, ("de", "en"))
    assert len({json.dumps(t.identity()) for t in (texts[1], changed, turned)}) == 3


# ---- public test sets --------------------------------------------------------------------------


def test_public_test_sets_from_the_directory_of_sacrebleu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What sacreBLEU has fetched once is used without a network."""
    from sacrebleu.dataset import DATASETS

    data = DATASETS["wmt14"]
    monkeypatch.setattr(data, "_outdir", str(tmp_path))
    for kind, text in (("src", "a\nb\n"), ("ref", "c\nd\n")):
        Path(data._get_txt_file_path("en-de", kind)).write_text(text)
    for field in data.fieldnames("en-de"):
        Path(data._get_txt_file_path("en-de", field)).touch()
    source, references = public_test_set("wmt14", EN_DE)
    assert [Path(source).name, *[Path(r).name for r in references]] == [
        "wmt14.en-de.src",
        "wmt14.en-de.ref",
    ]
    text = pairs_file("sacrebleu:wmt14", EN_DE)
    assert list(text.pairs()) == [Pair(1, "a", "c"), Pair(2, "b", "d")]


def test_test_sets_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A traceback of urllib, or a program that ended without a word."""
    from sacrebleu.dataset import DATASETS

    with pytest.raises(ConfigError, match=r"no test set 'wmt41'; did you mean .*wmt"):
        public_test_set("wmt41", EN_DE)
    with pytest.raises(ConfigError, match=r"wmt14 has no en-ja; it has .*en-de"):
        public_test_set("wmt14", ("en", "ja"))
    data = DATASETS["wmt14"]
    monkeypatch.setattr(data, "_outdir", str(tmp_path))
    monkeypatch.setattr(data, "_rawdir", str(tmp_path / "raw"))
    monkeypatch.setattr(data, "data", ["http://127.0.0.1:9/wmt14.tgz"])  # nobody answers there
    with pytest.raises(DataError, match=r"could not be fetched .*sacrebleu --download wmt14"):
        public_test_set("wmt14", EN_DE)
