"""The command `check`: what is wrong with a corpus, told before anything is trained on it."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from mttrain.cli_checks import at_least, must_exist, say
from mttrain.cli_options import (
    ConfigFile,
    Debug,
    Fields,
    Langs,
    Number,
    PairsFile,
    Settings,
    Words,
    given_options,
    language_pair,
    named_pairs,
    opt,
    shown,
)
from mttrain.cli_text import tokenizer_file
from mttrain.errors import ConfigError, DataError

if TYPE_CHECKING:
    from mttrain.config import RunConfig
    from mttrain.corpus import Pair
    from mttrain.pairs import ParallelText
    from mttrain.textreport import Finding, TextReport
    from mttrain.tokenizer import Tokenizer

Files = tuple[str, str] | None
Languages = tuple[str | None, str | None]
Roles = list[tuple[str, "ParallelText", Languages]]


def check(
    context: typer.Context,
    files: Annotated[
        Words, typer.Argument(metavar="SRC TGT", help="Parallel text, line by line.")
    ] = None,
    pairs: PairsFile = None,
    config: ConfigFile = None,
    settings: Settings = None,
    valid: Annotated[Files, opt("--valid", "SRC TGT", "Validation text.")] = None,
    test: Annotated[Files, opt("--test", "SRC TGT", "Test text.")] = None,
    langs: Langs = None,
    fields: Fields = None,
    model: Annotated[str | None, opt("--model", "RUN", "Count in its subwords.")] = None,
    tokenizer: Annotated[str | None, opt("--tokenizer", "F", "Count in its subwords.")] = None,
    max_length: Annotated[Number, opt("--max-length", "N", "Most subwords of a side.")] = None,
    max_ratio: Annotated[
        float | None, opt("--max-ratio", "X", "Most longer/shorter of the sides (3).")
    ] = None,
    strict: Annotated[
        bool, opt("--strict", None, "Status 3 when something deserves a look.")
    ] = False,
    as_json: Annotated[bool, opt("--json", None, "Print one JSON object.")] = False,
    debug: Debug = False,
) -> None:
    """Tell what is wrong with a corpus before training on it."""
    if sys.stdout is None:
        raise DataError("Standard output is closed; the findings go there.")
    _check_options(context)
    loaded = None
    if config is not None:
        from mttrain.config import load_config

        loaded = load_config(config, settings or ())
    texts = _texts(context, loaded)
    tokenizers = _tokenizers(model, tokenizer, loaded)
    if tokenizers is None and max_length is not None:
        raise ConfigError("--max-length counts subwords; name their --tokenizer F or --model RUN.")
    if tokenizers is None:
        say("no vocabulary given (--tokenizer, --model): lengths are counted in characters alone")
    fatal, lesser = _files(texts)
    if fatal:
        reports = fatal
    else:
        longest = max_length or (256 if loaded is None else loaded.data.max_length)
        ratio = max_ratio or (None if loaded is None else loaded.data.max_ratio)
        reports = _read(texts, tokenizers, longest, ratio)
        for report in reports:
            report.findings.extend(lesser.get(report.name, ()))
    _print(reports, as_json)
    levels = {finding.level for report in reports for finding in report.findings}
    if "error" in levels or (strict and "warning" in levels):
        raise typer.Exit(DataError.exit_code)


def _check_options(context: typer.Context) -> None:
    """Refuse what is missing, contradicts itself or has no effect; tell of missing files."""
    at = context.params
    files, pairs = at["files"] or [], at["pairs"]
    if sum((bool(files), pairs is not None, at["config"] is not None)) != 1:
        raise ConfigError("Name the text: SRC TGT, or --pairs F, or --config YAML.")
    if files and len(files) != 2:
        raise ConfigError(f"Give two files, SRC TGT; there are {len(files)}.")
    if at["settings"] and at["config"] is None:
        raise ConfigError("--set changes a setting of --config, which is missing.")
    if at["config"] is not None:
        idle = given_options(context, ("valid", "test", "langs"))
        if idle:
            names = ", ".join(f"--{name}" for name in idle)
            raise ConfigError(f"No effect with --config, which names these itself: {names}.")
    if at["fields"] is not None and pairs is None:
        raise ConfigError("--fields has an effect only with --pairs.")
    if at["model"] is not None and at["tokenizer"] is not None:
        raise ConfigError("Give --model or --tokenizer, not both.")
    at_least("--max-length", 2, at["max_length"])
    if at["max_ratio"] is not None and not at["max_ratio"] > 1:
        raise ConfigError(f"--max-ratio is {at['max_ratio']:g}; it must be more than 1.")
    held_out = [*(at["valid"] or ()), *(at["test"] or ())]
    must_exist(*files, None if (pairs or "").startswith("sacrebleu:") else pairs, *held_out)


def _texts(context: typer.Context, config: RunConfig | None) -> Roles:
    """The corpora by role, training first, with their languages."""
    from mttrain.pairs import ParallelText, parallel_text

    at = context.params
    if config is not None:
        data = config.data
        roles = [("training", corpus) for corpus in data.train] + [("validation", data.valid)]
        roles += [] if data.test is None else [("test", data.test)]
        found = [(role, parallel_text(corpus, data).shards()) for role, corpus in roles]
        return [(role, text, text.langs) for role, shards in found for text in shards]
    languages: Languages = (None, None) if at["langs"] is None else language_pair(at["langs"])
    none = ("source", "target")
    if at["pairs"] is not None:
        texts = [("training", named_pairs(at["pairs"], at["langs"], at["fields"]))]
    else:
        texts = [("training", ParallelText(tuple(at["files"]), none))]
    for role, files in (("validation", at["valid"]), ("test", at["test"])):
        if files is not None:
            texts.append((role, ParallelText(tuple(files), none)))
    return [(role, text, languages) for role, text in texts]


def _tokenizers(
    model: str | None, file: str | None, config: RunConfig | None
) -> tuple[Tokenizer, Tokenizer] | None:
    """What is named, else what the configuration names or its run has learned; None: nothing."""
    from mttrain.cli_text import Side
    from mttrain.tokenizer import Tokenizer

    if file is not None:
        shared = Tokenizer.load(file)
        return shared, shared
    sides: list[Any] = []
    if model is not None:
        sides = [tokenizer_file(model, side) for side in Side]
    elif config is not None:
        named = config.tokenizer
        sides = [named.path] * 2 if named.path else [named.source_path, named.target_path]
        if None in sides:
            names = ["tokenizer.json"] * 2
            if not named.shared:
                names = ["tokenizer.source.json", "tokenizer.target.json"]
            sides = [os.path.join(config.run_dir, name) for name in names]
            if not all(map(os.path.isfile, sides)):
                return None
    if not sides:
        return None
    return Tokenizer.load(sides[0]), Tokenizer.load(sides[1])


# ---- reading ----------------------------------------------------------------------------------


def _files(texts: Roles) -> tuple[list[TextReport], dict[str, list[Finding]]]:
    """What the bytes of the files say: reports on corpora that cannot be read as pairs, and the
    lesser findings of the others by their names. A pipe is read only once, so it is not looked at.
    """
    from mttrain.textreport import TextReport, file_findings, unequal

    fatal, lesser = [], {}
    for role, text, _ in texts:
        found, counts = [], {}
        for place, file in enumerate(text.files):
            if not os.path.isfile(file):
                continue
            counts[file], findings = file_findings(file)
            for finding in findings:
                finding.side = ("source", "target")[place] if len(text.files) == 2 else None
            found += findings
        if len(counts) == 2 and len(set(counts.values())) > 1:
            found.append(unequal(counts))
        if any(finding.level == "error" for finding in found):
            fatal.append(TextReport(text.name, role, 0, {}, found))
        else:
            lesser[text.name] = found
    return fatal, lesser


def _read(
    texts: Roles,
    tokenizers: tuple[Tokenizer, Tokenizer] | None,
    max_length: int,
    max_ratio: float | None,
) -> list[TextReport]:
    """Read the corpora and count."""
    from mttrain.textcheck import Text, check_text

    def pairs(text: ParallelText) -> Iterator[Pair]:
        return shown(text.pairs(), "file")

    found = [(role, Text(text.name, pairs(text), langs)) for role, text, langs in texts]
    training = [text for role, text in found if role == "training"]
    held_out = [(role, text) for role, text in found if role != "training"]
    return check_text(
        training,
        held_out,
        tokenizers=tokenizers,
        max_length=max_length,
        max_ratio=max_ratio,
    )


def _print(reports: list[TextReport], as_json: bool) -> None:
    from mttrain.check import PERCENTILES
    from mttrain.corpus import write_lines
    from mttrain.textrules import Level

    found = [finding for report in reports for finding in report.findings]
    levels = Counter(finding.level for finding in found)
    totals = {f"{level}s": levels[level] for level in get_args(Level)}
    if as_json:
        texts = [report.to_dict() for report in reports]
        content = {"texts": texts, "percentiles": list(PERCENTILES), **totals}
        write_lines(None, [json.dumps(content, ensure_ascii=False, allow_nan=False)])
        return
    lines: Iterable[str] = (line for report in reports for line in report.text().split("\n"))
    write_lines(None, lines)
    say(", ".join(f"{n} {name if n != 1 else name[:-1]}" for name, n in totals.items()))
