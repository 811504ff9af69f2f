"""The scores of `eval`: which metrics, how they are made, and how they are printed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import typer

from mttrain.cli_checks import say
from mttrain.cli_eval_text import EvalTexts
from mttrain.errors import ConfigError


def chosen_tokenizer(tokenize: str | None, lang: str | None) -> str:
    """The name of BLEU's tokenizer; told on stderr, and refused now if it is not installed."""
    from mttrain.metrics import bleu_tokenizer, require_tokenizer

    chosen = tokenize or bleu_tokenizer(lang)
    require_tokenizer(chosen)
    why = "--tokenize" if tokenize else f"target language {lang}" if lang else "no --lang given"
    say(f"BLEU tokenizer: {chosen} ({why})")
    return chosen


def add_scores(
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
    tell_doubts(hyps, refs[0], tokenizer)
    samples = at["samples"] or 1000
    how: dict[str, Any] = {"tokenize": tokenizer, "lowercase": at["lowercase"]}
    result["lines"] = len(hyps)
    result["scores"] = metrics.score_corpus(
        hyps, refs, bootstrap=samples if at["confidence"] else 0, **how
    )
    if base is not None:
        result["comparison"] = metrics.compare_systems(base, hyps, refs, samples=samples, **how)


def tell_doubts(hyps: list[str], ref: list[str], tokenizer: str) -> None:
    """Warn on stderr of text that this tokenizer is not made for."""
    from mttrain.metrics import cjk_warning, tokenized_warning

    for warning in (cjk_warning(ref, tokenizer), tokenized_warning(hyps)):
        if warning:
            say(f"warning: {warning}")


def check_comet(path: str, source: bool) -> None:
    """Refuse a model that is not there before anything is translated."""
    from mttrain.comet_metric import find_comet

    if not source:
        raise ConfigError("--comet judges by the source text too: give --source F.")
    find_comet(path)


def add_comet(
    context: typer.Context,
    result: dict[str, Any],
    hyps: list[str],
    texts: EvalTexts,
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


def print_result(result: Mapping[str, Any], as_json: bool) -> None:
    """The scores on stdout, as lines or as one JSON object."""
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
