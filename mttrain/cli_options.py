"""The options that commands share, and how those of decoding become a search and a model.

What the command line leaves open comes from the decode section that the model was trained with
(kept in its meta.json), then from the defaults. Options that contradict each other, or that would
have no effect, are refused before a model is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mttrain.cli_checks import SEARCH, option_names, say
from mttrain.errors import ConfigError

if TYPE_CHECKING:
    from mttrain.pairs import ParallelText
    from mttrain.translator import TranslateOptions, Translator


def opt(name: str, metavar: str | None, text: str) -> Any:
    """An option with a help text; no metavar: a switch, or one of a few words."""
    return typer.Option(name, metavar=metavar, help=text)


Precision = StrEnum("Precision", ["auto", "fp32", "bf16", "fp16", "int8"])
EngineName = StrEnum("EngineName", ["torch", "ctranslate2"])
Number = int | None
Words = list[str] | None

ConfigFile = Annotated[str | None, opt("--config", "YAML", "Configuration of the run.")]
Settings = Annotated[Words, opt("--set", "SECTION.KEY=VALUE", "Override a setting; repeatable.")]
Debug = Annotated[bool, opt("--debug", None, "Show the traceback of an error.")]
Input = Annotated[str, opt("--input", "F", 'Text, plain or gzip; "-" is stdin.')]
Output = Annotated[str, opt("--output", "F", 'Result; "-" is stdout, .gz compresses.')]
PairsFile = Annotated[
    str | None, opt("--pairs", "F", "Both sides in one file: .tsv, .jsonl or .tmx.")
]
Langs = Annotated[
    str | None, opt("--langs", "EN-DE", "Source and target language, to find them in --pairs.")
]
Fields = Annotated[
    str | None, opt("--fields", "A,B", "Columns or JSON names of source and target in --pairs.")
]
Models = Annotated[Words, opt("--model", "RUN", "Run or checkpoint directory; several: ensemble.")]
Beam = Annotated[Number, opt("--beam", "K", "Hypotheses kept per sentence; 1: greedy.")]
Penalty = Annotated[float | None, opt("--length-penalty", "A", "Rank by log-prob. / length^A.")]
MaxLength = Annotated[Number, opt("--max-length", "N", "Output tokens (3 x source + 20).")]
MinLength = Annotated[Number, opt("--min-length", "N", "Output tokens before the end.")]
NoRepeat = Annotated[Number, opt("--no-repeat-ngram", "N", "No N tokens in a row come twice.")]
Sample = Annotated[bool, opt("--sample", None, "Draw at random instead of searching.")]
Heat = Annotated[float | None, opt("--temperature", "X", "With --sample: below 1 is safer.")]
TopK = Annotated[Number, opt("--top-k", "N", "With --sample: the N likeliest tokens only.")]
TopP = Annotated[float | None, opt("--top-p", "X", "With --sample: this share of the mass.")]
Seed = Annotated[Number, opt("--seed", "S", "With --sample: of the draws.")]
SplitLong = Annotated[bool, opt("--split-long", None, "Translate long lines by sentences.")]
MaxSource = Annotated[
    Number, opt("--max-source-length", "N", "Subwords read of a line (1000 or more).")
]
BatchTokens = Annotated[
    Number, opt("--batch-tokens", "N", "Padded tokens of a batch: sentences x beam x longest.")
]
BatchSize = Annotated[Number, opt("--batch-size", "N", "Sentences of a batch; 1: line by line.")]
# No default value, so that a given one can be told from none.
Device = Annotated[str | None, opt("--device", "D", "cpu, cuda, cuda:N, mps or auto (auto).")]
Arithmetic = Annotated[
    Precision | None, opt("--precision", None, "Arithmetic of the model (auto); int8: on a CPU.")
]
WithEngine = Annotated[
    EngineName | None, opt("--engine", None, "What runs the model (torch); ctranslate2: an extra.")
]
Threads = Annotated[Number, opt("--threads", "N", "CPU threads (torch's choice).")]


def given_options(context: typer.Context, names: Sequence[str] = SEARCH) -> dict[str, Any]:
    """The options that stand on the command line, by parameter name."""
    values = {name: context.params.get(name) for name in names}
    # `in (None, False)` would also drop a 0, which equals False.
    return {name: v for name, v in values.items() if v is not None and v is not False}


def search_options(given: Mapping[str, Any], models: Sequence[str]) -> TranslateOptions:
    """The search options: command line, then the first model's decode section, then defaults."""
    from mttrain.checkpoint import read_meta, resolve_model
    from mttrain.translator import TranslateOptions, saved_decoding

    sample = "sample" in given
    if sample and "beam" in given:
        raise ConfigError("--sample draws instead of searching: --beam has no effect; remove it.")
    if "seed" in given and not sample:
        raise ConfigError("--seed has an effect only together with --sample.")
    folder = resolve_model(models[0])
    saved = saved_decoding(read_meta(folder), folder)
    if sample:
        saved.pop("beam", None)
    with option_names():
        return TranslateOptions(**{**saved, **given})


def load_translator(context: typer.Context, options: TranslateOptions | None = None) -> Translator:
    """The model or ensemble of --model, --engine, --device, --precision and --threads.

    ConfigError for search options that the engine lacks, before anything is loaded.
    """
    at = context.params
    device = "auto" if at["device"] is None else at["device"]
    how = {"device": device, "precision": str(at["precision"] or "auto"), "threads": at["threads"]}
    if _engine(at["model"], at.get("engine")) == EngineName.torch:
        from mttrain.translator import Translator

        return Translator.load(at["model"], **how)
    from mttrain.ct2_cache import load_ctranslate2
    from mttrain.ct2_engine import refuse_options

    with option_names():
        if options is not None:
            refuse_options(options)
    return load_ctranslate2(at["model"][0], **how, tell=say)


def _engine(models: Sequence[str], given: EngineName | None) -> EngineName:
    """--engine; a directory exported for CTranslate2 implies it."""
    from mttrain.ct2_files import is_exported

    exported = [model for model in models if is_exported(model)]
    if exported and given == EngineName.torch:
        raise ConfigError(
            f"{exported[0]} is an export for CTranslate2: --engine torch cannot load it; give the "
            "run it was made of."
        )
    if len(models) > 1 and (exported or given == EngineName.ctranslate2):
        raise ConfigError(
            "CTranslate2 runs one model, not an ensemble: give one --model, or --engine torch."
        )
    return EngineName.ctranslate2 if exported else given or EngineName.torch


def shown(items: Iterator[Any], output: str, total: int | None = None) -> Iterator[Any]:
    """Count lines on the terminal, unless the result is printed there."""
    from tqdm import tqdm

    seen = sys.stderr is not None and sys.stderr.isatty()
    quiet = not seen or (output == "-" and sys.stdout.isatty())
    yield from tqdm(items, unit=" lines", leave=False, disable=quiet, total=total)


def named_pairs(
    pairs: str, langs: str | None, fields: str | None, known: tuple[str, str] | None = None
) -> ParallelText:
    """The text of --pairs, --langs and --fields; `known` stands for --langs if that is not given.

    ConfigError where the languages are needed and unknown.
    """
    from pydantic import ValidationError

    from mttrain.config import CorpusConfig
    from mttrain.dataconfig import pairs_kind
    from mttrain.pairs import pairs_file

    wanted = None
    if fields is not None:
        names = [int(name) if name.isdecimal() else name for name in fields.split(",")]
        try:
            wanted = CorpusConfig.model_validate({"pairs": pairs, "fields": names}).fields
        except ValidationError as error:
            message = error.errors()[0]["msg"].removeprefix("fields: ")
            raise ConfigError(f"--fields {fields}: {message}; write A,B.") from None
    direction = known if langs is None else language_pair(langs)
    if direction is None and pairs_kind(pairs) in ("tmx", "sacrebleu"):
        raise ConfigError(f"Which languages of {pairs}? Name them, such as --langs en-de.")
    return pairs_file(pairs, direction or ("source", "target"), wanted)


def language_pair(langs: str) -> tuple[str, str]:
    """ "en-de" -> ("en", "de"); a colon separates codes that hold a hyphen: "en:pt-BR"."""
    one, separator, two = langs.partition(":" if ":" in langs else "-")
    if not (one and separator and two):
        raise ConfigError(f"--langs {langs}: write source and target, such as en-de or en:pt-BR.")
    return one, two
