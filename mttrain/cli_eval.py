"""The command `eval`: scores of a model, or of a file of translations.

What is read stands in `cli_eval_text`, what the model does in `cli_eval_model`, the scores in
`cli_eval_score`, the search for a length penalty in `cli_eval_tune`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from mttrain.cli_checks import (
    MOST_THREADS,
    at_least,
    check_language,
    check_target,
    must_exist,
    option_name,
    refuse_overwriting,
)
from mttrain.cli_eval_model import given_choice, run_model
from mttrain.cli_eval_score import (
    add_comet,
    add_scores,
    check_comet,
    chosen_tokenizer,
    print_result,
)
from mttrain.cli_eval_text import read, read_texts
from mttrain.cli_eval_tune import TuneMetric, check_tuning, tune
from mttrain.cli_options import (
    Arithmetic,
    BatchSize,
    BatchTokens,
    Beam,
    Candidates,
    Debug,
    Device,
    Fields,
    Heat,
    Langs,
    MaxLength,
    MaxSource,
    Mbr,
    MinLength,
    Models,
    NoRepeat,
    Number,
    PairsFile,
    Penalty,
    Rerank,
    RerankWeight,
    Sample,
    Seed,
    SplitLong,
    Tag,
    Threads,
    TopK,
    TopP,
    WithEngine,
    Words,
    given_options,
    language_pair,
    opt,
)
from mttrain.errors import ConfigError, DataError


def evaluate(
    context: typer.Context,
    model: Models = None,
    source: Annotated[str | None, opt("--source", "F", "With --model: the text.")] = None,
    ref: Annotated[Words, opt("--ref", "F", "Reference; repeatable.")] = None,
    pairs: PairsFile = None,
    test_set: Annotated[
        str | None, opt("--test-set", "NAME", "A public test set of sacreBLEU, such as wmt14.")
    ] = None,
    langs: Langs = None,
    fields: Fields = None,
    hyp: Annotated[str | None, opt("--hyp", "F", "Translations, instead of --model.")] = None,
    baseline: Annotated[str | None, opt("--baseline", "F", "Others: paired bootstrap.")] = None,
    lang: Annotated[
        str | None, opt("--lang", "L", "Target language, for BLEU's tokenizer.")
    ] = None,
    tokenize: Annotated[str | None, opt("--tokenize", "T", "BLEU's tokenizer, by name.")] = None,
    lowercase: Annotated[bool, opt("--lowercase", None, "Ignore case.")] = False,
    confidence: Annotated[bool, opt("--confidence", None, "Bootstrap 95 % intervals.")] = False,
    samples: Annotated[Number, opt("--samples", "N", "Bootstrap samples (1000).")] = None,
    comet: Annotated[
        str | None, opt("--comet", "PATH", "COMET too, by this model; needs --source.")
    ] = None,
    tune_length_penalty: Annotated[
        bool, opt("--tune-length-penalty", None, "Which A scores best on validation text?")
    ] = False,
    tune_metric: Annotated[
        TuneMetric | None, opt("--tune-metric", None, "What chooses that A (bleu).")
    ] = None,
    as_json: Annotated[bool, opt("--json", None, "Print one JSON object.")] = False,
    output: Annotated[str | None, opt("--output", "F", "Keep the translations.")] = None,
    beam: Beam = None,
    length_penalty: Penalty = None,
    max_length: MaxLength = None,
    min_length: MinLength = None,
    no_repeat_ngram: NoRepeat = None,
    sample: Sample = False,
    temperature: Heat = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = None,
    mbr: Mbr = None,
    candidates: Candidates = None,
    rerank: Rerank = None,
    rerank_weight: RerankWeight = None,
    tag: Tag = None,
    split_long: SplitLong = False,
    max_source_length: MaxSource = None,
    batch_tokens: BatchTokens = None,
    batch_size: BatchSize = None,
    device: Device = None,
    precision: Arithmetic = None,
    threads: Threads = None,
    engine: WithEngine = None,
    debug: Debug = False,
) -> None:
    """Score translations (BLEU, chrF, TER) against references."""
    if sys.stdout is None:
        raise DataError("Standard output is closed; the scores go there.")
    _check(context)
    (tune if tune_length_penalty else _evaluate)(context)


def _evaluate(context: typer.Context) -> None:
    at = context.params
    texts = read_texts(context)
    base = None if at["baseline"] is None else read(at["baseline"])
    if base is not None:
        texts.check_length(at["baseline"], base)
    result: dict[str, Any] = {} if at["test_set"] is None else {"test_set": at["test_set"]}
    if at["hyp"] is not None:
        hyps = read(at["hyp"])
        texts.check_length(at["hyp"], hyps)
        lang = at["lang"]
        if lang is None and at["langs"] is not None and at["tokenize"] is None:
            lang = language_pair(at["langs"])[1]
        result |= {"lang": lang, "tokenizer": chosen_tokenizer(at["tokenize"], lang)}
    else:
        hyps = run_model(context, result, texts)
    add_scores(context, result, hyps, texts.refs, base)
    if at["comet"] is not None:
        add_comet(context, result, hyps, texts, base)
    print_result(result, at["as_json"])


def _check(context: typer.Context) -> None:
    """Refuse options that are missing, contradict each other or have no effect."""
    at = context.params
    both = [name for name in ("pairs", "test_set") if at[name] is not None]
    if both:
        idle = [*both[1:], *(name for name in ("source", "ref") if at[name])]
        if idle:
            raise ConfigError(f"No effect with {option_name(both[0])}: {_listed(idle)}.")
    elif alone := given_options(context, ("langs", "fields")):
        raise ConfigError(f"No effect without --pairs or --test-set: {_listed(alone)}.")
    elif not at["ref"]:
        raise ConfigError("Name the reference: --ref F, --pairs F or --test-set NAME.")
    if bool(at["model"]) == (at["hyp"] is not None):
        raise ConfigError("Give either --model RUN with --source F, or --hyp F.")
    if at["model"] and at["source"] is None and not both:
        raise ConfigError("--model needs the text to translate: --source F.")
    if at["hyp"] is not None:
        others = ["output", "precision", "threads", "engine", "tune_length_penalty"]
        if at["comet"] is None:  # which reads the source, on a device
            others += ["source", "device"]
        idle = [*given_options(context), *given_choice(context), *given_options(context, others)]
        if idle:
            raise ConfigError(
                f"No effect with --hyp, which is translated already: {_listed(idle)}."
            )
    check_tuning(context)
    resampled = at["confidence"] or at["baseline"] is not None or at["tune_length_penalty"]
    if at["samples"] is not None and not resampled:
        raise ConfigError(
            "--samples has an effect only with --confidence, --baseline or --tune-length-penalty."
        )
    if at["tokenize"] is not None and at["lang"] is not None:
        raise ConfigError("--tokenize decides what --lang would choose; give one of them.")
    if at["comet"] is not None:
        check_comet(at["comet"], bool(at["source"] or both))
    at_least("--threads", 1, at["threads"], MOST_THREADS)
    at_least("--samples", 2, at["samples"])
    check_language(at["lang"])
    refs, pairs = at["ref"] or [], at["pairs"]
    file = None if pairs is None or pairs.startswith("sacrebleu:") else pairs
    must_exist(at["source"], at["hyp"], at["baseline"], file, *refs)
    texts = {"source file": at["source"], "baseline file": at["baseline"], "file of --pairs": file}
    refuse_overwriting(at["output"], texts)
    for ref in refs:
        refuse_overwriting(at["output"], {**texts, "reference file": ref})
    if at["model"]:
        check_target(at["lang"], at["model"][0], at["tag"])


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(option_name, names))
