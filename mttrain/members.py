"""What the models behind a translator must have in common: tokenizers, languages, tags.

An ensemble averages the probabilities of its members token by token, so the same ids must mean the
same in all of them. What a model was trained for stands in its meta.json; older ones say less, and
what nobody knows is not compared. Costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from mttrain.checkpoint import ModelBundle
from mttrain.engine import Described
from mttrain.errors import CheckpointError
from mttrain.tags import check_tag


def check_ensemble(bundles: Sequence[ModelBundle]) -> None:
    """CheckpointError when the members have other tokenizers or languages."""
    first = bundles[0]
    for other in bundles[1:]:
        for side in ("source", "target"):
            mine, its = (getattr(b, f"{side}_tokenizer").hash for b in (first, other))
            if mine != its:
                raise CheckpointError(
                    f"{other.path} and {first.path} have different {side} tokenizers; an ensemble "
                    "needs models that were trained with the same one."
                )
            mine, its = (b.meta.get(f"{side}_lang") for b in (first, other))
            if mine and its and mine != its:
                raise CheckpointError(
                    f"{other.path} and {first.path} have different {side} languages ({its} and "
                    f"{mine}); an ensemble needs models of one translation direction."
                )


def tag_ids(members: Sequence[Described], tag: str | None) -> list[int]:
    """What stands before each source: the tag, which every member must know, or nothing.

    ConfigError for a tag that one was not trained with, and for none where one needs it.
    """
    for member in members:
        check_tag(tag, member.meta, member.path)
        if tag is not None and tag not in member.source_tokenizer.tags:
            raise CheckpointError(f"{member.path}: its source tokenizer has no tag {tag}.")
    return [] if tag is None else [members[0].source_tokenizer.tags[tag]]
