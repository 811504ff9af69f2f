"""What `eval` reads: the text, its references, and which languages they are in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import typer

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
    known = _languages(at["model"][0]) if at["model"] else None
    if known is not None and at["langs"] is not None:
        wanted = language_pair(at["langs"])
        if not all(map(same_language, known, wanted)):
            raise ConfigError(f"--langs {at['langs']}, but the model is for {'-'.join(known)}.")
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


def _languages(model: str) -> tuple[str, str] | None:
    """The languages that a model was trained on."""
    from mttrain.checkpoint import read_meta, resolve_model

    meta = read_meta(resolve_model(model))
    langs = (meta.get("source_lang"), meta.get("target_lang"))
    return langs if all(isinstance(lang, str) for lang in langs) else None  # type: ignore
