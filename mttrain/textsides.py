"""Which language a line looks like, told from a corpus itself and from very common words.

Two ways, each silent where it is not sure. `Sides` learns from the first pairs of a corpus which
words and which script are typical of one side and rare on the other; a line with three typical
words of the other side and none of its own is on the wrong side. This needs no knowledge of the
languages, but words with spaces between them, or two scripts. `looks_like` knows the commonest
words of some languages and the scripts of others, and tells what a whole side looks like.

Price: some 5 microseconds a pair, and the first pairs of a corpus in memory.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from mttrain.corpus import Pair
from mttrain.languages import CHINESE, JAPANESE, KOREAN, base_code

LEARN_FROM = 4096  # pairs
_LEAST = 200  # pairs below which nothing is learned
_SEEN = 5  # lines that a typical word must be in at least,
_SHARE = 0.005  # and this share of them
_TIMES = 10  # how much more often it must be on its own side
_TYPICAL = 400  # words kept for each side
_EVIDENCE = 3  # typical words of the wrong side, and none of the own, that decide
_MOSTLY = 0.9  # share of the lines in a script that makes it the script of a side
_SAME = 0.5  # share of the word use that both sides have in common in one language

# Han and kana are one: a Japanese line may hold either.
_SCRIPTS = {
    "Han": "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff",
    "Hangul": "\u1100-\u11ff\uac00-\ud7af",
    "Cyrillic": "\u0400-\u052f",
    "Greek": "\u0370-\u03ff\u1f00-\u1fff",
    "Arabic": "\u0600-\u06ff\u0750-\u077f",
    "Hebrew": "\u0590-\u05ff",
    "Devanagari": "\u0900-\u097f",
    "Thai": "\u0e00-\u0e7f",
    "Latin": "A-Za-z\u00c0-\u024f\u1e00-\u1eff",
}
_LETTERS = re.compile("|".join(f"(?P<{name}>[{chars}]+)" for name, chars in _SCRIPTS.items()))
_OTHER_SCRIPT = re.compile("[" + "".join(v for k, v in _SCRIPTS.items() if k != "Latin") + "]")
_SCRIPT_OF = {
    **dict.fromkeys(CHINESE | JAPANESE, "Han"),
    **dict.fromkeys(KOREAN, "Hangul"),
    **dict.fromkeys(("ru", "rus", "uk", "ukr", "be", "bg", "bul", "mk"), "Cyrillic"),
    **dict.fromkeys(("el", "ell"), "Greek"),
    **dict.fromkeys(("ar", "ara", "fa", "fas", "ur", "urd"), "Arabic"),
    **dict.fromkeys(("he", "heb"), "Hebrew"),
    **dict.fromkeys(("hi", "hin", "mr", "mar", "ne", "nep"), "Devanagari"),
    **dict.fromkeys(("th", "tha"), "Thai"),
}
# Words that hardly a text of the language goes without, and others do.
_COMMON = {
    "en": "the of and to is that it was for with this are you not have",
    "de": "der die und das ist nicht ein mit den auf sich dem auch eine wir",
    "fr": "le la les et des est une dans pour que qui pas sur vous nous",
    "es": "el los las y que del una por con para no su como pero más",
    "it": "il di che è una per non della con sono gli nel ha questo più",
    "pt": "os que não uma com para do da em as por mais dos você foi",
    "nl": "de het een van en niet dat is op zijn voor met ik wij aan",
    "sv": "och att det är som en på inte för med jag har till vi ett",
    "da": "og at det er som en på ikke for med jeg har til vi et",
    "pl": "nie że się na jest to do jak po ale za od przez tak był",
    "cs": "se že na je to si ale jako být jsem by jsou pro tak když",
    "fi": "ja on ei että se oli hän mutta niin kun myös ovat olen tämä",
    "tr": "bir ve bu için çok ne değil var ama daha olarak gibi kadar",
}
_WORDS_OF = {lang: frozenset(words.split()) for lang, words in _COMMON.items()}
_THREE_LETTERS = {
    "eng": "en", "deu": "de", "ger": "de", "fra": "fr", "fre": "fr", "spa": "es", "ita": "it",
    "por": "pt", "nld": "nl", "dut": "nl", "swe": "sv", "dan": "da", "pol": "pl", "ces": "cs",
    "cze": "cs", "fin": "fi", "tur": "tr",
}  # fmt: skip


def script(text: str) -> str | None:
    """The script of most letters of a line; None where there is no letter of a known one."""
    if _OTHER_SCRIPT.search(text) is None:
        return "Latin" if _LETTERS.search(text) else None
    counts: Counter[str] = Counter()
    for run in _LETTERS.finditer(text):
        counts[str(run.lastgroup)] += len(run[0])
    return counts.most_common(1)[0][0]


class Sides:
    """What is typical of each side of a corpus, learned from its first pairs."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        used = [pair for pair in pairs if pair.source != pair.target]
        sides = [[pair.source for pair in used], [pair.target for pair in used]]
        self.pairs = len(used)
        source, target = (_word_counts(lines) for lines in sides)
        self._typical = [_typical(source, target, len(used)), _typical(target, source, len(used))]
        self._scripts = [_main_script(lines) for lines in sides]
        self._common = _in_common(source, target)

    @property
    def same_language(self) -> float:
        """The share of the word use that both sides have in common; 0 where it says little."""
        return self._common if self.pairs >= _LEAST and self._common > _SAME else 0.0

    def wrong(self, pair: Pair) -> str | None:
        """ "swapped", or the side that looks like the language of the other one; None if neither.

        A pair of equal sides is neither.
        """
        if self.pairs < _LEAST or pair.source == pair.target:
            return None
        source = self._looks_like_other(pair.source, 0)
        target = self._looks_like_other(pair.target, 1)
        if source and target:
            return "swapped"
        return "source" if source else "target" if target else None

    def _looks_like_other(self, text: str, side: int) -> bool:
        own, other = self._scripts[side], self._scripts[1 - side]
        if own is not None and other is not None and own != other:
            return script(text) == other and len(text.split()) >= _EVIDENCE
        words = set(text.lower().split())
        return len(words & self._typical[1 - side]) >= _EVIDENCE and not words & self._typical[side]


def _word_counts(lines: Iterable[str]) -> Counter[str]:
    """In how many lines each word is."""
    counts: Counter[str] = Counter()
    for line in lines:
        counts.update(set(line.lower().split()))
    return counts


def _typical(own: Counter[str], other: Counter[str], lines: int) -> frozenset[str]:
    least = max(_SEEN, _SHARE * lines)
    found = [
        word
        for word, count in own.most_common()
        if count >= least and other[word] * _TIMES <= count and any(map(str.isalpha, word))
    ]
    return frozenset(found[:_TYPICAL])


def _main_script(lines: Sequence[str]) -> str | None:
    counts = Counter(filter(None, map(script, lines)))
    name, count = counts.most_common(1)[0] if counts else ("", 0)
    return name if count and count >= _MOSTLY * counts.total() else None


def _in_common(one: Counter[str], other: Counter[str]) -> float:
    """Words in common, each as often as on the side that has it less, of all words."""
    shared = sum(min(count, other[word]) for word, count in one.items())
    return shared / max(one.total(), other.total(), 1)


def looks_like(lines: Sequence[str], lang: str | None) -> str | None:
    """What text that is said to be in `lang` looks like instead: a language code or a script.

    None when it may well be `lang`, when that is unknown here, or for fewer than 200 lines.
    """
    code = base_code(lang)
    code = _THREE_LETTERS.get(code, code)
    wanted = _SCRIPT_OF.get(code, "Latin" if code in _WORDS_OF else None)
    found = _main_script(lines)
    if wanted is None or found is None or len(lines) < _LEAST:
        return None
    if found != wanted:
        return f"{found} script"
    if code not in _WORDS_OF:
        return None
    words = [set(line.lower().split()) for line in lines]
    hits = {name: sum(bool(line & common) for line in words) for name, common in _WORDS_OF.items()}
    best = max(hits, key=hits.__getitem__)
    sure = hits[best] > 0.3 * len(lines) and hits[best] > 3 * hits[code]
    return best if sure else None
