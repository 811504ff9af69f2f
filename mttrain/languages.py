"""What a language code says about text without spaces: how to score it and how to join it.

Codes are those of ISO 639, of two or three letters, alone or followed by a region or a script:
"zh", "zh-CN", "jpn_Jpan". Compared as whole codes: "jav" is Javanese, not Japanese. Costs nothing.
"""

from __future__ import annotations

CHINESE = frozenset({"zh", "zho", "chi", "cmn", "yue"})
JAPANESE = frozenset({"ja", "jpn"})
KOREAN = frozenset({"ko", "kor"})

# Names and country codes that are often written instead. Private codes ("xx") stay free.
_WRONG_NAMES = {
    wrong: code
    for code, names in {
        "zh": "chinese mandarin cn",
        "ja": "japanese jp",
        "ko": "korean",
        "ko (Kanuri: kau)": "kr",
        "de": "german deutsch",
        "en": "english",
        "fr": "french francais",
        "es": "spanish",
        "it": "italian",
        "pt": "portuguese",
        "nl": "dutch",
        "ru": "russian",
        "cs": "czech cz",
        "ar": "arabic",
    }.items()
    for wrong in names.split()
}


def base_code(lang: str | None) -> str:
    """The language alone, in lower case: "zh" for "zh-CN"; empty for None."""
    return (lang or "").lower().replace("_", "-").split("-")[0]


def suggested_code(lang: str) -> str | None:
    """What to write instead of a well-known wrong name such as "cn" or "german"; else None."""
    return _WRONG_NAMES.get(base_code(lang))


def looks_like_code(lang: str) -> bool:
    """Whether the language is named by two or three letters."""
    base = base_code(lang)
    return len(base) in (2, 3) and base.isascii() and base.isalpha()


def same_language(one: str, other: str) -> bool:
    """False only when two codes contradict each other: "de" and "deu" may be the same."""
    codes = [base_code(lang) for lang in (one, other)]
    codes = [_WRONG_NAMES.get(code, code).split()[0] if code else "" for code in codes]
    for family in (CHINESE, JAPANESE, KOREAN):
        inside = [code in family for code in codes]
        if any(inside):
            return all(inside)
    return codes[0] == codes[1] or len(codes[0]) != len(codes[1])


def sentence_space(lang: str | None) -> str:
    """What stands between two sentences: nothing in Chinese and Japanese, otherwise a space."""
    return "" if base_code(lang) in CHINESE | JAPANESE else " "
