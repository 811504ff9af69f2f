"""What a language code says about text without spaces: how to score it and how to join it.

Codes are those of ISO 639, of two or three letters, alone or followed by a region or a script:
"zh", "zh-CN", "jpn_Jpan". Compared as whole codes: "jav" is Javanese, not Japanese. Costs nothing.
"""

from __future__ import annotations

CHINESE = frozenset({"zh", "zho", "chi", "cmn", "yue"})
JAPANESE = frozenset({"ja", "jpn"})
KOREAN = frozenset({"ko", "kor"})


def base_code(lang: str | None) -> str:
    """The language alone, in lower case: "zh" for "zh-CN"; empty for None."""
    return (lang or "").lower().replace("_", "-").split("-")[0]


def sentence_space(lang: str | None) -> str:
    """What stands between two sentences: nothing in Chinese and Japanese, otherwise a space."""
    return "" if base_code(lang) in CHINESE | JAPANESE else " "
