"""What `eval` reads: the text, its references, and which languages they are in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import typer

from mttrain.cli_checks import option_names
from mttrain.cli_options import language_pair, named_pairs
from mttrain.errors import ConfigError, unequal_lines
from mttrain.languages import same_language


@dataclass(frozen=True)
class EvalTexts:
    """What is translated and what it is compared with; names are for messages."""

    source: str | None
    sources: list[str]
    refs: list[list[str]]
    reference: str  # name of the first

    def check_length(self, name: str, lines: Sequence[str]) -> None:
        """Refuse lines that do not belong to the references."""
        from mttrain.corpus import path_name

        others = self.refs[0]
        if len(lines) != len(others):
            raise unequal_lines(path_name(name), len(lines), path_name(self.reference), len(others))


def read_texts(context: typer.Context) -> EvalTexts:
    """Read what --source and --ref, --pairs or --test-set name."""
    at = context.params
    known = None
    if at["model"]:
        source, target, tags = model_languages(at["model"][0], at["tag"])
        if at["langs"] is not None:
            _check_langs(at["langs"], source, target, at["tag"], tags)
        known = None if source is None or target is None else (source, target)
    if at["pairs"] is not None:
        text = named_pairs(at["pairs"], at["langs"], at["fields"], known)
        pairs = list(text.required_pairs())
        refs = [[pair.target for pair in pairs]]
        return EvalTexts(text.name, [pair.source for pair in pairs], refs, text.name)
    source, names = at["source"], at["ref"]
    if at["test_set"] is not None:
        source, names = _test_set(at["test_set"], at["langs"], known, at["fields"])
    refs = [read(name) for name in names]
    sources = read(source) if source is not None else []
    texts = EvalTexts(source, sources, refs, names[0])
    for name, lines in zip(names[1:], refs[1:], strict=True):
        texts.check_length(name, lines)
    if source is not None:
        texts.check_length(source, sources)
    return texts


def read(name: str) -> list[str]:
    """All lines of a file."""
    from mttrain.corpus import read_lines

    return list(read_lines(name))


def _test_set(
    name: str, langs: str | None, known: tuple[str, str] | None, fields: str | None
) -> tuple[str, list[str]]:
    """Files of source and references of a public test set."""
    from mttrain.testsets import public_test_set

    if fields is not None:
        raise ConfigError("--fields has no effect with --test-set.")
    direction = language_pair(langs) if langs else known
    if direction is None:
        raise ConfigError("Which direction of the test set? Name it, such as --langs en-de.")
    source, references = public_test_set(name, direction)
    return source, references


def model_languages(model: str, tag: str | None) -> tuple[str | None, str | None, bool]:
    """Source and target language of a model with this tag, as far as they are known, and whether it
    has tags at all: then its text may come from other languages, too.

    ConfigError for a tag that the model was not trained with, or none where it needs one.
    """
    from mttrain.checkpoint import read_meta, resolve_model
    from mttrain.tags import check_tag, direction

    folder = resolve_model(model)
    meta = read_meta(folder)
    with option_names():
        check_tag(tag, meta, folder)
    return *direction(meta, tag), bool(meta.get("tags"))


def _check_langs(
    langs: str, source: str | None, target: str | None, tag: str | None, tags: bool
) -> None:
    """Refuse a direction that is none of the model's."""
    first, second = language_pair(langs)
    if target is None or (source is None and not tags):
        return  # the model does not say
    if tags and not same_language(target, second):
        asked = "" if tag is None else f"with --tag {tag} "
        raise ConfigError(f"--langs {langs}, but {asked}the model translates into {target}.")
    both = source is not None and same_language(source, first) and same_language(target, second)
    if not (tags or both):
        raise ConfigError(f"--langs {langs}, but the model is for {source}-{target}.")
