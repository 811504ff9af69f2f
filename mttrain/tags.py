"""Tags: a word of ours before a source that says what kind of text it is, or what is wanted.

`<2de>` asks a model of several languages for German (Johnson et al. 2017), `<bt>` marks text that
a machine has translated back (Caswell et al. 2019). A tag is one entry of the source vocabulary to
which no merge leads, so that no text yields it. meta.json of a checkpoint says what it was trained
with: `tags`, each with the target language of its text (null where there were several), and
`untagged`, whether there was text without a tag. Costs one token a sentence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mttrain.errors import CheckpointError, ConfigError
from mttrain.languages import base_code

TAG_PATTERN = "[A-Za-z0-9][A-Za-z0-9_-]{0,63}"
# Signs alone, as in "<->", could be merged; a letter or digit always parts the signs around it.
_NAME = re.compile(TAG_PATTERN)
_TOKEN = re.compile(f"<({TAG_PATTERN})>")
_RESERVED = ("pad", "unk", "s")  # special tokens look like that


def name_problem(name: str) -> str | None:
    """Why this cannot be the name of a tag, or None."""
    if not _NAME.fullmatch(name):
        return (
            "a tag is up to 64 letters (a to z), digits, - and _, and begins with none of these two"
        )
    if name in _RESERVED:
        return f"<{name}> is a special token; choose another name"
    return None


def language_tag(lang: str) -> str:
    """The name of the tag that asks for a target language."""
    return f"2{lang}"


def tag_token(name: str) -> str:
    """The vocabulary entry of a tag."""
    return f"<{name}>"


def name_in_token(token: str) -> str | None:
    """The name of the tag that a vocabulary entry may be, by its form alone."""
    found = _TOKEN.fullmatch(token)
    return None if found is None or found[1] in _RESERVED else found[1]


def note_tag(tags: dict[str, str | None], tag: str, lang: str | None) -> None:
    """Add a tag with the target language of its text; None where it has several."""
    tags[tag] = lang if tags.get(tag, lang) == lang else None


def listed(names: Sequence[str] | Mapping[str, object]) -> str:
    """Names for a message."""
    return ", ".join(names)


# ---- what a model knows -----------------------------------------------------------------------


def meta_tags(meta: Mapping[str, Any], path: Path) -> dict[str, str | None]:
    """The tags that a model was trained with, and their target languages; none in older ones."""
    found = meta.get("tags", {})
    if isinstance(found, dict) and isinstance(meta.get("untagged", True), bool):
        sound = all(lang is None or isinstance(lang, str) for lang in found.values())
        if sound and not any(map(name_problem, found)):
            return found
    raise CheckpointError(f"{path}: the tags in meta.json are damaged.")


def check_tag(tag: str | None, meta: Mapping[str, Any], path: Path) -> None:
    """ConfigError when a model was not trained on text with this tag (None: without any)."""
    known = meta_tags(meta, path)
    if tag is None:
        if known and not meta.get("untagged", True):
            raise ConfigError(
                f"{path} was trained on text with tags alone: give tag NAME, one of "
                f"{listed(known)}."
            )
    elif not known:
        raise ConfigError(f"{path} was trained without tags: tag has no effect; remove it.")
    elif tag not in known:
        raise ConfigError(f"tag {tag} is unknown to {path}; it was trained with {listed(known)}.")


def needed_tag(meta: Mapping[str, Any], path: Path) -> str | None:
    """The first tag of a model that takes no text without one, else None."""
    known = meta_tags(meta, path)
    return next(iter(known), None) if not meta.get("untagged", True) else None


def tag_lang(tag: str | None, meta: Mapping[str, Any]) -> str | None:
    """The language of the output: that of the tag where that has one, else the model's."""
    known = meta.get("tags")
    lang = known.get(tag) if tag is not None and isinstance(known, dict) else None
    lang = meta.get("target_lang") if lang is None else lang
    return lang if isinstance(lang, str) else None


def direction(meta: Mapping[str, Any], tag: str | None) -> tuple[str | None, str | None]:
    """Source and target language with this tag (None: without any); None for what is not known.

    From where the text of a tag came meta.json does not say: mostly from the main source, or from
    several languages. So the source is that of the main direction, unless the tag asks for just
    this language: with `2en` a model from English to German translates into English, from German
    or anything else.
    """
    source, target = meta.get("source_lang"), tag_lang(tag, meta)
    if not isinstance(source, str):
        return None, target
    turned = target != tag_lang(None, meta) and base_code(target) == base_code(source)
    return (None if turned else source), target
