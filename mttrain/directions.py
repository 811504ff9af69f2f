"""In which direction a model translates: its main one, or the one that a tag asks for.

meta.json names the languages of the main direction, and the target of each tag. From where the text
of a tag came it does not say: mostly from the main source, or from several languages. So another
source than that is no contradiction where there are tags. Costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mttrain.languages import base_code
from mttrain.tags import tag_lang


def direction(meta: Mapping[str, Any], tag: str | None) -> tuple[str | None, str | None]:
    """Source and target language with this tag (None: without any); None for what is not known.

    The source is that of the main direction, unless the tag asks for just this language: with
    `2en` a model from English to German translates into English, from German or anything else.
    """
    source, target = meta.get("source_lang"), tag_lang(tag, meta)
    if not isinstance(source, str):
        return None, target
    turned = target != tag_lang(None, meta) and base_code(target) == base_code(source)
    return (None if turned else source), target
