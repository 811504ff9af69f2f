"""Every kind of finding, set into an otherwise clean corpus and found where it was set."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest

from mttrain.corpus import Pair, read_pairs
from mttrain.errors import DataError
from mttrain.textcheck import Text, check_text
from mttrain.textreport import Finding, TextReport, file_findings
from mttrain.textrules import RULES, excerpt, line_faults, numbers
from mttrain.textsides import Sides, looks_like, script
from mttrain.tokenizer import Tokenizer, train_tokenizer

DEMO = Path(__file__).resolve().parents[2] / "data" / "demo"


@pytest.fixture(scope="module")
def clean() -> list[Pair]:
    """Real sentences of two languages, none of them twice."""
    pairs = read_pairs(DEMO / "train.en", DEMO / "train.de")
    found: dict[str, Pair] = {}
    for pair in pairs:
        if pair.target not in {p.target for p in found.values()}:
            found.setdefault(pair.source, pair)
        if len(found) == 600:
            break
    return [Pair(n, pair.source, pair.target) for n, pair in enumerate(found.values(), 1)]


def with_pairs(clean: list[Pair], **changed: tuple[str, str]) -> list[Pair]:
    """The clean corpus with other text at some lines: l7=(source, target)."""
    lines = {int(name[1:]): texts for name, texts in changed.items()}
    return [Pair(p.line, *lines.get(p.line, (p.source, p.target))) for p in clean]


def report(
    pairs: list[Pair], langs: tuple[str | None, str | None] = (None, None), **how: object
) -> TextReport:
    [found] = check_text([Text("corpus", pairs, langs)], **how)  # type: ignore[arg-type]
    return found


def finding(found: TextReport, kind: str) -> Finding:
    """The only finding of the kind."""
    [one] = [finding for finding in found.findings if finding.kind == kind]
    return one


def test_a_clean_corpus_has_no_findings(clean: list[Pair]) -> None:
    """A check that cries at everything is read by nobody."""
    found = report(clean, langs=("en", "de"))
    assert found.pairs == 600
    assert [f.kind for f in found.findings] == []
    assert found.text().endswith("nothing found")


SOURCE_FAULTS = [
    ("control", "a \x07 bell"),
    ("control", "caf\x92 in Windows-1252"),
    ("separator", "one\u2028two"),
    ("separator", "one\rtwo"),
    ("bom", "joined \ufeffhere"),
    ("tab", "one\ttwo"),
    ("invisible", "soft\xadhyphen"),
    ("private_use", "a box \uf0b7 here"),
    ("replacement", "caf\ufffd here"),
    ("mojibake", "schÃ¶n and caf\u00c3\u00a9"),
    ("mojibake", "it\u00e2\u20ac\u2122s"),
    ("entity", "salt &amp; pepper"),
    ("entity", "it&#39;s late"),
    ("markup", "a <b>bold</b> word"),
    ("subword_marks", "the hou@@ se"),
    ("outer_space", "The end. "),
    ("outer_space", "\u3000The end."),
    ("long_line", "word " * 500 + "end"),
    ("not_nfc", unicodedata.normalize("NFD", "déjà vu")),
]


@pytest.mark.parametrize(("kind", "text"), SOURCE_FAULTS, ids=lambda value: str(value)[:20])
def test_each_fault_of_a_line_is_found_where_it_is(clean: list[Pair], kind: str, text: str) -> None:
    """A kind whose test never fires gives a clean bill to every corpus."""
    for side in ("source", "target"):
        pair = clean[416]
        texts = (text, pair.target) if side == "source" else (pair.source, text)
        found = finding(report(with_pairs(clean, l417=texts)), kind)
        assert (found.side, found.count, found.of, found.lines) == (side, 1, 600, [417])
        assert found.example is not None and found.example["line"] == 417
        assert found.example[side].isprintable()
        assert found.to_dict()["share"] == 1 / 600


@pytest.mark.parametrize(
    "text",
    ["AT&T and R&D;", "2 < 3 > 1", "Não É À NÃO “MAÇÔ", "x@y.org", "10\xa0000\u202f€", "naïve",
     "Ärger über Öl", "¿Qué? ¡Sí!", "Âge d’or — «Ça»", "क्\u200dष", "@@", "I ▁ am", "a - b . . ."],
)  # fmt: skip
def test_ordinary_text_is_no_fault(text: str) -> None:
    """Names, currencies and other languages were taken for markup or broken encodings."""
    assert list(line_faults(text)) == []


PAIR_FAULTS = [
    ("blank", "The house.", " \u3000"),
    ("identical", "The house is red.", "The house is red."),
    ("ratio", "Yes, of course.", "Ja, natürlich, " + "das ist doch sehr klar " * 4),
    ("numbers", "In 1984 it rained.", "Im Jahr 1985 regnete es."),
    ("urls", "See https://a.example/b now.", "Siehe https://a.example/c jetzt."),
    ("no_letters", "A whole sentence.", "12 ... 34"),
]


@pytest.mark.parametrize(("kind", "source", "target"), PAIR_FAULTS, ids=lambda value: value[:12])
def test_each_fault_of_a_pair(clean: list[Pair], kind: str, source: str, target: str) -> None:
    found = finding(report(with_pairs(clean, l9=(source, target))), kind)
    assert (found.side, found.count, found.lines) == (None, 1, [9])
    assert found.example == {"line": 9, "source": source, "target": excerpt(target)}


def test_numbers_are_compared_by_value() -> None:
    """10,000 and 10 000 were two numbers: thousands are grouped in other ways elsewhere."""
    assert numbers("10,000 and 1,234.56") == numbers("1.234,56 und 10\u202f000")
    assert numbers("42") == numbers("٤٢") == {42}
    assert numbers("9 lives, call 0049" + "1" * 30) == set()


def test_repeats_by_brute_force() -> None:
    """Line numbers of repeats, against a dictionary, over two corpora read after each other."""
    draw = random.Random(5)
    corpora = [
        [Pair(n, f"s{draw.randrange(40)}", f"t{draw.randrange(4)}") for n in range(1, 200)]
        for _ in range(2)
    ]
    wanted: list[dict[str, list[int]]] = []
    pairs: set[tuple[str, str]] = set()
    sources: set[str] = set()
    for corpus in corpora:
        lines: dict[str, list[int]] = {"duplicate": [], "several_targets": []}
        for pair in corpus:
            key = (pair.source, pair.target)
            if key in pairs:
                lines["duplicate"].append(pair.line)
            elif pair.source in sources:
                lines["several_targets"].append(pair.line)
            pairs.add(key)
            sources.add(pair.source)
        wanted.append(lines)
    reports = check_text([Text("one", corpora[0]), Text("two", corpora[1])])
    for found, lines, corpus in zip(reports, wanted, corpora, strict=True):
        for kind, numbers_ in lines.items():
            one = finding(found, kind)
            assert (one.count, one.lines) == (len(numbers_), numbers_[:5])
            assert one.example is not None
            assert one.example["source"] == corpus[one.lines[0] - 1].source


def test_overlap_with_held_out_text(clean: list[Pair]) -> None:
    """Lines of the test set that training has seen; their numbers are those of the test set."""
    held = [Pair(1, "new", "neu"), Pair(2, clean[7].source, "anders"), Pair(3, "", "")]
    held.append(Pair(4, clean[3].source, clean[3].target))
    training, test = check_text([Text("train", clean)], [("test", Text("held", held))])
    found = finding(test, "overlap")
    assert (found.count, found.of, found.lines) == (2, 4, [2, 4])
    assert found.detail == "1 with the same target" and test.role == "test"
    assert not [f for f in training.findings if f.kind == "overlap"]


def test_sides_that_are_swapped_or_untranslated(clean: list[Pair]) -> None:
    """One swapped pair among right ones; and a whole test set that is the wrong way round."""
    long = next(p for p in clean if len(p.source.split()) > 8 and len(p.target.split()) > 8)
    pairs = with_pairs(
        clean,
        **{f"l{long.line}": (long.target, long.source), "l600": (long.source, f"{long.source}!")},
    )
    found = report(pairs)
    assert finding(found, "swapped").lines == [long.line]
    assert (finding(found, "untranslated").side, finding(found, "untranslated").lines) == (
        "target", [600],
    )  # fmt: skip
    turned = [Pair(p.line, p.target, p.source) for p in clean]
    en_de = ("en", "de")
    _, test = check_text([Text("train", clean, en_de)], [("test", Text("turned", turned, en_de))])
    assert finding(test, "swapped").count > 300
    wrong = [f for f in test.findings if f.kind == "language"]
    assert [(f.side, f.detail[-2:]) for f in wrong] == [("source", "de"), ("target", "en")]


def test_scripts_tell_sides_apart() -> None:
    """Without spaces there are no words to be typical; the script is."""
    pairs = [Pair(n, f"this is the house {n}", f"这是房子{n}号") for n in range(1, 400)]
    sides = Sides(pairs)
    assert sides.wrong(Pair(1, "another fine house", "另一个好房子")) is None
    assert sides.wrong(Pair(1, "这 是 房子", "this is the house")) == "swapped"
    assert sides.wrong(Pair(1, "this is a house", "that was not translated")) == "target"
    assert [script(x) for x in ("дом", "σπίτι", "a 家家", "123 !")] == [
        "Cyrillic", "Greek", "Han", None,
    ]  # fmt: skip
    assert looks_like(["這是一個房子"] * 300, "en") == "Han script"
    assert looks_like(["這是一個房子"] * 300, "zh-TW") is None
    assert looks_like(["quux foo bar"] * 300, "en") is None  # nothing is known: nothing is said


def test_both_sides_in_one_language(clean: list[Pair]) -> None:
    """The source file given twice, with small differences."""
    pairs = [Pair(p.line, p.source, p.source.replace(".", " indeed.")) for p in clean]
    found = finding(report(pairs), "same_language")
    assert found.count == 0 and "%" in found.detail
    assert "warning: the same words on both sides" in found.text()


def test_style_of_a_whole_side(clean: list[Pair]) -> None:
    """E01: text that another tool tokenized or lower-cased; a single such line is nothing."""
    one = report(with_pairs(clean, l5=("a lower one .", "ein kleiner .")))
    assert [f.kind for f in one.findings] == []
    pairs = [Pair(p.line, p.source.replace(".", " ."), p.target.lower()) for p in clean]
    found = report(pairs)
    assert finding(found, "tokenized").side == "source"
    assert finding(found, "tokenized").count == sum(" ." in p.source for p in pairs)
    assert (finding(found, "lowercased").side, finding(found, "lowercased").count) == (
        "target", 600,
    )  # fmt: skip


def test_subwords_are_counted_as_training_counts_them(clean: list[Pair]) -> None:
    """The figures must be those of the rules that leave pairs out; none without a tokenizer."""
    tokenizer: Tokenizer = train_tokenizer([p.source for p in clean], vocab_size=300)
    found = report(clean, tokenizers=(tokenizer, tokenizer), max_length=20, max_ratio=1.5)
    sides = [[p.source for p in clean], [p.target for p in clean]]
    counts = [[len(tokenizer.encode(text)) + 1 for text in side] for side in sides]
    lengths = list(zip(*counts, strict=True))
    fit = [(one, two) for one, two in lengths if max(one, two) <= 20]
    unequal = [max(one, two) - 1 > 1.5 * (min(one, two) - 1) for one, two in fit]
    assert finding(found, "too_long").count == len(lengths) - len(fit) > 0
    assert finding(found, "subword_ratio").count == sum(unequal) > 0
    assert found.lengths["source subwords"][-1] == max(source for source, _ in lengths)
    characters = sorted(len(p.source) for p in clean)
    assert found.lengths["source characters"][0] == characters[299]
    assert "source subwords" not in report(clean).lengths


def test_empty_corpus_is_a_finding() -> None:
    found = report([])
    assert [f.kind for f in found.findings] == ["empty"] and found.lengths == {}


def test_bytes_of_a_file(files: Callable[..., str]) -> None:
    """T07, T04: all lines that are not UTF-8, the first with its byte; CR LF by number."""
    path = files("x", b"one\r\ntwo\ncaf\xe9 au\n\xff\xfelast")
    count, found = file_findings(path)
    assert count == 4
    bad, crlf = found
    assert (bad.kind, bad.count, bad.lines) == ("not_utf8", 2, [3, 4])
    assert bad.detail == "first: byte 0xe9 at offset 12"
    assert bad.example == {"line": 3, "text": "caf\\xe9 au"}
    assert (crlf.kind, crlf.count, crlf.lines, crlf.level) == ("crlf", 1, [1], "note")
    with pytest.raises(DataError, match="cannot read it"):
        file_findings(path + "-")


def test_examples_are_one_printable_line() -> None:
    """An example that rings the bell or clears the screen is worse than none."""
    assert excerpt("a\x1b[2J\u2028b\x00") == "a\\x1b[2J\\u2028b\\x00"
    shown = excerpt("x" * 100 + "!" + "y" * 100, 100)
    assert shown.startswith("…x") and shown.endswith("y…") and "!" in shown and len(shown) == 72


def test_findings_come_in_the_order_of_the_rules(clean: list[Pair]) -> None:
    pairs = with_pairs(clean, l1=("a\tb", "c"), l2=("", "x"), l3=("same", "same"))
    kinds = [f.kind for f in report(pairs).findings]
    assert kinds == sorted(kinds, key=list(RULES).index) and len(kinds) >= 3
