"""The options that commands share, and how those of decoding become a search and a model.

What the command line leaves open comes from the decode section that the model was trained with
(kept in its meta.json), then from the defaults. Options that contradict each other, or that would
have no effect, are refused before a model is loaded.

--mbr and --rerank choose the output among several candidates. A command that has their four options
takes `candidate_options` of its search options, and passes what the translator yields through what
`chooser` gives it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mttrain.cli_checks import SEARCH, at_least, option_names, say
from mttrain.errors import ConfigError

if TYPE_CHECKING:
    from mttrain.pairs import ParallelText
    from mttrain.rerank import Reranker
    from mttrain.translations import Translation
    from mttrain.translator import TranslateOptions, Translator

    Chooser = Callable[[Iterator[Translation]], Iterator[Translation]]


def opt(name: str, metavar: str | None, text: str) -> Any:
    """An option with a help text; no metavar: a switch, or one of a few words."""
    return typer.Option(name, metavar=metavar, help=text)


Precision = StrEnum("Precision", ["auto", "fp32", "bf16", "fp16", "int8"])
EngineName = StrEnum("EngineName", ["torch", "ctranslate2"])
UtilityName = StrEnum("UtilityName", ["chrf", "bleu"])
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
Mbr = Annotated[
    UtilityName | None, opt("--mbr", None, "Take the output that most agrees with the others.")
]
Candidates = Annotated[
    Number, opt("--candidates", "N", "With --mbr, --rerank: of a line (the beam; 32 draws).")
]
Rerank = Annotated[Words, opt("--rerank", "RUN", "A model that judges the outputs; repeatable.")]
RerankWeight = Annotated[
    list[float] | None, opt("--rerank-weight", "W", "Of its score (1); for each --rerank.")
]
Tag = Annotated[
    str | None, opt("--tag", "NAME", "The tag before each source, such as 2de, if it has tags.")
]
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
    engine = _engine(at["model"], at.get("engine"))
    if engine == EngineName.ctranslate2 and options is not None:
        from mttrain.ct2_engine import refuse_options

        with option_names():
            refuse_options(options)
    return _loaded(context, at["model"], engine)


def _loaded(context: typer.Context, models: list[str], engine: EngineName) -> Translator:
    at = context.params
    device = "auto" if at["device"] is None else at["device"]
    how = {"device": device, "precision": str(at["precision"] or "auto"), "threads": at["threads"]}
    if engine == EngineName.torch:
        from mttrain.translator import Translator

        return Translator.load(models, **how)
    from mttrain.ct2_cache import load_ctranslate2

    return load_ctranslate2(models[0], **how, tell=say)


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


# ---- the output among candidates --------------------------------------------------------------

CHOICE = ("mbr", "candidates", "rerank", "rerank_weight")  # parameters that the functions read
_DRAWS = 32  # candidates of a line when sampling


def candidate_options(context: typer.Context, options: TranslateOptions) -> TranslateOptions:
    """The search options that find the candidates of --mbr or --rerank: as many as their n-best.

    Unchanged without these two. ConfigError for what contradicts them or has no effect.
    """
    at = context.params
    wanted, weights = at["candidates"], at["rerank_weight"]
    if weights and not at["rerank"]:
        raise ConfigError("--rerank-weight has an effect only together with --rerank.")
    if at["mbr"] is None and not at["rerank"]:
        if wanted is not None:
            raise ConfigError("--candidates has an effect only together with --mbr or --rerank.")
        return options
    if at["mbr"] is not None and at["rerank"]:
        raise ConfigError("--mbr and --rerank both decide the order of the outputs; give one.")
    name = "--rerank" if at["mbr"] is None else "--mbr"
    if options.split_long:
        raise ConfigError(
            f"{name} needs several outputs for a whole line, and --split-long gives one for each "
            "of its parts; remove one of the two."
        )
    if not options.sample and options.beam == 1:
        raise ConfigError(
            f"{name} chooses among several outputs, and greedy search (beam 1) finds one; raise "
            "--beam, or give --sample."
        )
    at_least("--candidates", 2, wanted)
    count = wanted or (_DRAWS if options.sample else options.beam)
    if not options.sample and count > options.beam:
        raise ConfigError(
            f"--candidates {count} is more than --beam {options.beam} can give; raise --beam."
        )
    if options.nbest > count:
        raise ConfigError(f"--nbest {options.nbest} is more than the {count} candidates of a line.")
    if at["rerank"]:
        _check_rerankers(at["model"][0], at["rerank"], weights or [1.0], options.tag)
    return replace(options, nbest=count)


def _check_rerankers(
    model: str, others: Sequence[str], weights: Sequence[float], tag: str | None
) -> None:
    """Refuse wrong weights and languages before anything is loaded."""
    from mttrain.checkpoint import read_meta, resolve_model
    from mttrain.rerank import role_of
    from mttrain.tags import check_tag

    if len(weights) not in (1, len(others)):
        raise ConfigError(
            f"--rerank-weight stands there {len(weights)} times, but --rerank {len(others)}; give "
            "one weight for each model, in their order, or one for all."
        )
    for weight in weights:
        if not (weight > 0 and math.isfinite(weight)):
            raise ConfigError(f"--rerank-weight is {weight:g}; it must be above 0.")
    first, *metas = [read_meta(resolve_model(name)) for name in (model, *others)]
    with option_names():
        check_tag(tag, first, resolve_model(model))
    for name, meta in zip(others, metas, strict=True):
        role_of(first, meta, name, tag)


def chooser(context: typer.Context, translator: Translator, options: TranslateOptions) -> Chooser:
    """What puts the candidates of each translation in order, as --mbr or --rerank says.

    options: what `candidate_options` gave. Loads the models of --rerank, with --device, --precision
    and --threads; raises MissingDependency where BLEU's tokenizer needs a missing package.
    """
    at = context.params
    if at["mbr"] is not None:
        from mttrain.mbr import choose_by_mbr, make_utility
        from mttrain.tags import tag_lang

        lang = tag_lang(options.tag, translator.members[0].meta) or ""
        utility = make_utility(at["mbr"], lang)
        return lambda found: choose_by_mbr(found, utility, sampled=options.sample)
    if at["rerank"]:
        from mttrain.rerank import rerank

        rerankers = _rerankers(context, translator, options.tag)
        return lambda found: rerank(found, rerankers, options, say)
    return lambda found: found


def _rerankers(context: typer.Context, translator: Translator, tag: str | None) -> list[Reranker]:
    from mttrain.rerank import Reranker, role_of

    names: list[str] = context.params["rerank"]
    weights = context.params["rerank_weight"] or [1.0]
    rerankers = []
    for name, weight in zip(names, weights * (len(names) // len(weights)), strict=True):
        judge = _loaded(context, [name], _engine([name], None))
        role = role_of(translator.members[0].meta, judge.members[0].meta, name, tag)
        rerankers.append(Reranker(judge, role, weight))
    return rerankers


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
