"""The model of `eval`: loaded, its translations, and what it thinks of the reference."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from mttrain.cli_checks import SEARCH, option_names, say
from mttrain.cli_eval_score import chosen_tokenizer
from mttrain.cli_eval_text import EvalTexts
from mttrain.cli_options import (
    CHOICE,
    candidate_options,
    chooser,
    given_options,
    load_translator,
    search_options,
    shown,
)
from mttrain.errors import CheckpointError, DataError

if TYPE_CHECKING:
    from mttrain.cli_options import Chooser
    from mttrain.engine import Described
    from mttrain.translator import TranslateOptions, Translator


# Settings of the search that are told only where they do something, and what does nothing.
_FURTHER = {
    "top_k": 0, "top_p": 1.0, "min_length": 0, "no_repeat_ngram": 0, "split_long": False,
    "tag": None,
}  # fmt: skip


@dataclass(frozen=True)
class EvalModel:
    """A loaded model, how it is to search, and BLEU's tokenizer for its language."""

    translator: Translator
    options: TranslateOptions  # completed
    choose: Chooser  # puts the candidates of a line in order
    choice: dict[str, Any]  # the options that say how
    lang: str | None
    tokenizer: str

    def facts(self) -> dict[str, Any]:
        """Plain values for JSON: which model, engine and search, and how BLEU is made."""
        return {
            "model": [str(bundle.path) for bundle in self.translator.members],
            "engine": self.translator.engine.name,
            "decoding": {name: getattr(self.options, name) for name in SEARCH} | self.choice,
            "lang": self.lang,
            "tokenizer": self.tokenizer,
        }


def load_model(context: typer.Context) -> EvalModel:
    """What --model and the options of the search mean."""
    at = context.params
    options = candidate_options(context, search_options(given_options(context), at["model"]))
    translator = load_translator(context, options)
    with option_names():
        options = translator.completed(options)
    lang = at["lang"] or _target_language(translator.members[0], options.tag)
    tokenizer = chosen_tokenizer(at["tokenize"], lang)
    choice = given_choice(context)
    choose = chooser(context, translator, options)
    return EvalModel(translator, options, choose, choice, lang, tokenizer)


def given_choice(context: typer.Context) -> dict[str, Any]:
    """The options that choose among candidates and stand on the command line."""
    given = given_options(context, CHOICE)
    return {name: value for name, value in given.items() if value not in ((), [])}


def run_model(context: typer.Context, result: dict[str, Any], texts: EvalTexts) -> list[str]:
    """Translations of the source; how they were made, and what the model thinks of the reference,
    goes into the result."""
    from mttrain.corpus import LineWriter
    from mttrain.translations import Summary

    at = context.params
    sources = texts.sources
    require_lines(texts)
    with contextlib.ExitStack() as stack:
        writer = None
        if at["output"] is not None:  # opened first: a wrong path must not cost the translations
            writer = stack.enter_context(LineWriter(at["output"]))
        model = load_model(context)
        translator, options = model.translator, model.options
        if not at["as_json"]:
            say(_setting(model))
        summary, hyps = Summary(), []
        found = model.choose(translator.translate_lines(sources, options))
        for translation in shown(found, "file"):
            summary.add(translation)
            hyps.append(translation.text)
            if writer is not None:
                writer.write(translation.text)
    say(summary.text())
    result |= model.facts()
    result |= _likelihood(translator, sources, texts.refs[0], options)
    return hyps


def require_lines(texts: EvalTexts) -> None:
    """DataError for an empty text."""
    if not texts.sources:
        raise DataError(f"There are no lines to score: {texts.source} is empty.")


def _target_language(bundle: Described, tag: str | None) -> str | None:
    """That of the text with the tag, where the tag has one."""
    from mttrain.tags import tag_lang

    lang = bundle.meta.get("target_lang")
    if lang is not None and not isinstance(lang, str):
        raise CheckpointError(f"{bundle.path}: the target_lang of meta.json is damaged.")
    return tag_lang(tag, bundle.meta)


def _setting(model: EvalModel) -> str:
    """With which model and search the translations are made: what JSON holds as "decoding"."""
    options, choice = model.options, model.choice
    if options.sample:
        how = f"sampling with temperature {options.temperature:g}, seed {options.seed}"
    else:
        how = f"beam {options.beam}, length penalty {options.length_penalty:g}"
    for name, off in _FURTHER.items():
        if (value := getattr(options, name)) != off:
            how += f", {name.replace('_', ' ')}" + ("" if value is True else f" {value}")
    if "mbr" in choice:
        how += f", of {options.nbest} candidates by MBR with {choice['mbr']}"
    if "rerank" in choice:
        judges = " and ".join(choice["rerank"])
        how += f", of {options.nbest} candidates by the scores of {judges}, too"
    output = options.max_length or "3 x source + 20"
    return (
        f"model {model_name(model.translator)}: {how}; at most {output} tokens of output, "
        f"{options.max_source_length} of a source"
    )


def model_name(translator: Translator) -> str:
    """The directories of the model or the ensemble; the engine, if it is not our own."""
    names = " and ".join(str(bundle.path) for bundle in translator.members)
    if translator.engine.name != "torch":
        names += f" ({translator.engine.name})"
    return names


def _likelihood(
    translator: Translator, sources: list[str], reference: list[str], options: TranslateOptions
) -> dict[str, float]:
    """Mean negative log-likelihood per token (EOS counts, nats) of the first reference; sources
    are tagged and cut as in translation. No model reads a blank source: as in `score`, it is left
    out."""
    from mttrain.metrics import perplexity
    from mttrain.translations import lines_warning

    numbered = list(enumerate(zip(sources, reference, strict=True), 1))
    read = [(number, pair) for number, pair in numbered if pair[0].strip()]
    blank = [(number, pair[1]) for number, pair in numbered if not pair[0].strip()]
    if unread := [number for number, ref in blank if ref.strip()]:
        say(lines_warning(unread, "had a blank source and a reference; the NLL is without it"))
    pairs = [pair for _, pair in read]
    scores = translator.score(pairs, max_source_length=options.max_source_length, tag=options.tag)
    if cut := [number for (number, _), score in zip(read, scores, strict=True) if score.cut]:
        say(lines_warning(cut, "went beyond the limit; the NLL is that of what was left"))
    tokens = sum(score.tokens for score in scores)
    nll = -sum(score.sum for score in scores) / max(tokens, 1)
    counts = {"target_tokens": tokens, "cut_pairs": len(cut), "unscored_pairs": len(unread)}
    return {"nll": nll, "perplexity": perplexity(nll), **counts}
