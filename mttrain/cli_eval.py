"""The command `eval`: scores of a model, or of a file of translations."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mttrain.cli_checks import (
    MOST_THREADS,
    SEARCH,
    at_least,
    check_language,
    check_target,
    must_exist,
    option_name,
    option_names,
    refuse_overwriting,
    say,
)
from mttrain.cli_options import (
    Arithmetic,
    BatchSize,
    BatchTokens,
    Beam,
    Debug,
    Device,
    Fields,
    Heat,
    Langs,
    MaxLength,
    MaxSource,
    MinLength,
    Models,
    NoRepeat,
    Number,
    PairsFile,
    Penalty,
    Sample,
    Seed,
    SplitLong,
    Threads,
    TopK,
    TopP,
    WithEngine,
    Words,
    given_options,
    language_pair,
    load_translator,
    named_pairs,
    opt,
    search_options,
    shown,
)
from mttrain.errors import CheckpointError, ConfigError, DataError, unequal_lines
from mttrain.languages import same_language

if TYPE_CHECKING:
    from mttrain.engine import Described
    from mttrain.translator import TranslateOptions, Translator


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
    _check_eval(context)
    texts = _texts(context)
    base = None if baseline is None else _read(baseline)
    if base is not None and baseline is not None:
        texts.check_length(baseline, base)
    result: dict[str, Any] = {} if test_set is None else {"test_set": test_set}
    if hyp is not None:
        hyps = _read(hyp)
        texts.check_length(hyp, hyps)
        if lang is None and langs is not None and tokenize is None:
            lang = language_pair(langs)[1]
        result |= {"lang": lang, "tokenizer": _chosen_tokenizer(tokenize, lang)}
    else:
        hyps = _run_model(context, result, texts)
    _score(context, result, hyps, texts.refs, base)
    if comet is not None:
        _score_comet(context, result, hyps, texts, base)
    _print_result(result, as_json)


def _check_eval(context: typer.Context) -> None:
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
        others = ["output", "precision", "threads", "engine"]
        if at["comet"] is None:  # which reads the source, on a device
            others += ["source", "device"]
        idle = [*given_options(context), *given_options(context, others)]
        if idle:
            raise ConfigError(
                f"No effect with --hyp, which is translated already: {_listed(idle)}."
            )
    if at["samples"] is not None and not at["confidence"] and at["baseline"] is None:
        raise ConfigError("--samples has an effect only with --confidence or --baseline.")
    if at["tokenize"] is not None and at["lang"] is not None:
        raise ConfigError("--tokenize decides what --lang would choose; give one of them.")
    if at["comet"] is not None:
        _check_comet(at["comet"], bool(at["source"] or both))
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
        check_target(at["lang"], at["model"][0])


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(option_name, names))


@dataclass(frozen=True)
class _Texts:
    """What is translated and what it is compared with; names are for messages."""

    source: str | None
    sources: list[str]
    refs: list[list[str]]
    reference: str  # name of the first

    def check_length(self, name: str, lines: Sequence[str]) -> None:
        """Refuse lines that do not belong to the references."""
        _same_length(name, lines, self.reference, self.refs[0])


def _texts(context: typer.Context) -> _Texts:
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
        return _Texts(text.name, [pair.source for pair in pairs], refs, text.name)
    source, names = at["source"], at["ref"]
    if at["test_set"] is not None:
        source, names = _test_set(at["test_set"], at["langs"], known, at["fields"])
    refs = [_read(name) for name in names]
    sources = _read(source) if source is not None else []
    texts = _Texts(source, sources, refs, names[0])
    for name, lines in zip(names[1:], refs[1:], strict=True):
        texts.check_length(name, lines)
    if source is not None:
        texts.check_length(source, sources)
    return texts


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


def _read(name: str) -> list[str]:
    from mttrain.corpus import read_lines

    return list(read_lines(name))


def _same_length(name: str, lines: Sequence[str], other: str, others: Sequence[str]) -> None:
    from mttrain.corpus import path_name

    if len(lines) != len(others):
        raise unequal_lines(path_name(name), len(lines), path_name(other), len(others))


def _chosen_tokenizer(tokenize: str | None, lang: str | None) -> str:
    """The name of BLEU's tokenizer; told on stderr, and refused now if it is not installed."""
    from mttrain.metrics import bleu_tokenizer, require_tokenizer

    chosen = tokenize or bleu_tokenizer(lang)
    require_tokenizer(chosen)
    why = "--tokenize" if tokenize else f"target language {lang}" if lang else "no --lang given"
    say(f"BLEU tokenizer: {chosen} ({why})")
    return chosen


def _run_model(context: typer.Context, result: dict[str, Any], texts: _Texts) -> list[str]:
    """Translations of the source; how they were made, and what the model thinks of the reference,
    goes into the result."""
    from mttrain.corpus import LineWriter
    from mttrain.translations import Summary

    at = context.params
    sources = texts.sources
    if not sources:
        raise DataError(f"There are no lines to score: {texts.source} is empty.")
    with contextlib.ExitStack() as stack:
        writer = None
        if at["output"] is not None:  # opened first: a wrong path must not cost the translations
            writer = stack.enter_context(LineWriter(at["output"]))
        options = search_options(given_options(context), at["model"])
        translator = load_translator(context, options)
        with option_names():
            options = translator.completed(options)
        lang = at["lang"] or _target_language(translator.members[0])
        tokenizer = _chosen_tokenizer(at["tokenize"], lang)
        if not at["as_json"]:
            say(_setting(translator, options))
        summary, hyps = Summary(), []
        for translation in shown(translator.translate_lines(sources, options), "file"):
            summary.add(translation)
            hyps.append(translation.text)
            if writer is not None:
                writer.write(translation.text)
    say(summary.text())
    decoding = {name: getattr(options, name) for name in SEARCH}
    result |= {"model": [str(bundle.path) for bundle in translator.members]}
    result |= {"engine": translator.engine.name, "decoding": decoding}
    result |= {"lang": lang, "tokenizer": tokenizer}
    result |= _likelihood(translator, sources, texts.refs[0], options.max_source_length)
    return hyps


def _target_language(bundle: Described) -> str | None:
    lang = bundle.meta.get("target_lang")
    if lang is not None and not isinstance(lang, str):
        raise CheckpointError(f"{bundle.path}: the target_lang of meta.json is damaged.")
    return lang


def _setting(translator: Translator, options: TranslateOptions) -> str:
    """With which model and search the translations are made: what JSON holds as "decoding"."""
    if options.sample:
        how = f"sampling with temperature {options.temperature:g}, seed {options.seed}"
    else:
        how = f"beam {options.beam}, length penalty {options.length_penalty:g}"
    output = options.max_length or "3 x source + 20"
    names = " and ".join(str(bundle.path) for bundle in translator.members)
    if translator.engine.name != "torch":
        names += f" ({translator.engine.name})"
    return (
        f"model {names}: {how}; at most {output} tokens of output, {options.max_source_length} of "
        "a source"
    )


def _likelihood(
    translator: Translator, sources: list[str], reference: list[str], longest: int | None
) -> dict[str, float]:
    """Mean negative log-likelihood per token (EOS counts, nats) of the first reference; sources
    are cut as in translation."""
    from mttrain.metrics import perplexity
    from mttrain.translations import lines_warning

    pairs = zip(sources, reference, strict=True)
    scores = translator.score(pairs, max_source_length=longest)
    cut = [number for number, score in enumerate(scores, 1) if score.cut]
    if cut:
        say(lines_warning(cut, "went beyond the limit; the NLL is that of what was left"))
    tokens = sum(score.tokens for score in scores)
    nll = -sum(score.sum for score in scores) / max(tokens, 1)
    counts = {"target_tokens": tokens, "cut_pairs": len(cut)}
    return {"nll": nll, "perplexity": perplexity(nll), **counts}


def _score(
    context: typer.Context,
    result: dict[str, Any],
    hyps: list[str],
    refs: list[list[str]],
    base: list[str] | None,
) -> None:
    """Put scores and comparison into the result; warnings go to stderr."""
    from mttrain import metrics

    at = context.params
    tokenizer = result["tokenizer"]
    for warning in (metrics.cjk_warning(refs[0], tokenizer), metrics.tokenized_warning(hyps)):
        if warning:
            say(f"warning: {warning}")
    samples = at["samples"] or 1000
    how: dict[str, Any] = {"tokenize": tokenizer, "lowercase": at["lowercase"]}
    result["lines"] = len(hyps)
    result["scores"] = metrics.score_corpus(
        hyps, refs, bootstrap=samples if at["confidence"] else 0, **how
    )
    if base is not None:
        result["comparison"] = metrics.compare_systems(base, hyps, refs, samples=samples, **how)


def _check_comet(path: str, source: bool) -> None:
    """Refuse a model that is not there before anything is translated."""
    from mttrain.comet_metric import find_comet

    if not source:
        raise ConfigError("--comet judges by the source text too: give --source F.")
    find_comet(path)


def _score_comet(
    context: typer.Context,
    result: dict[str, Any],
    hyps: list[str],
    texts: _Texts,
    base: list[str] | None,
) -> None:
    """Put COMET's score and comparison beside the others."""
    from mttrain import comet_metric
    from mttrain.distributed import choose_device

    at = context.params
    device = str(choose_device(at["device"] or "auto"))
    model = comet_metric.find_comet(at["comet"])
    samples = at["samples"] or 1000
    if len(texts.refs) > 1:
        say("COMET takes one reference: the first is used")
    systems = [hyps] if base is None else [hyps, base]
    scores, references = comet_metric.sentence_scores(
        model, systems, texts.sources, texts.refs[0], device=device
    )
    signature = model.signature(references)
    bootstrap = samples if at["confidence"] else 0
    result["scores"].append(comet_metric.corpus_score(scores[0], signature, bootstrap=bootstrap))
    if base is not None:
        compared = comet_metric.compare(scores[1], scores[0], signature, samples=samples)
        result["comparison"].append(compared)


def _print_result(result: Mapping[str, Any], as_json: bool) -> None:
    from mttrain.corpus import write_lines

    parts = ("scores", "comparison")
    if as_json:
        plain = dict(result)
        for name in parts:
            if name in plain:
                plain[name] = [item.to_dict() for item in plain[name]]
        for name in ("nll", "perplexity"):
            if not math.isfinite(plain.get(name, 0.0)):
                plain[name] = None  # JSON has neither infinity nor NaN
        write_lines(None, [json.dumps(plain, ensure_ascii=False, allow_nan=False)])
        return
    lines = [item.text() for name in parts for item in result.get(name, ())]
    if "nll" in result:
        lines.append(
            f"NLL = {result['nll']:.4f} nats per token, perplexity {result['perplexity']:.2f} "
            f"({result['target_tokens']} tokens of the first reference, EOS included)"
        )
    write_lines(None, lines)
