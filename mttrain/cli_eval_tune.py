"""`eval --tune-length-penalty`: the table of length penalties and their scores on a text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mttrain.cli_checks import option_name, say
from mttrain.cli_eval_model import EvalModel, given_choice, load_model, model_name, require_lines
from mttrain.cli_eval_score import tell_doubts
from mttrain.cli_eval_text import EvalTexts, read_texts
from mttrain.cli_options import given_options, shown
from mttrain.errors import ConfigError, MttrainError

if TYPE_CHECKING:
    from mttrain.metrics import Comparison, Score
    from mttrain.translations import Translation
    from mttrain.tuning import Tuning

TuneMetric = StrEnum("TuneMetric", ["bleu", "chrf"])

# What says how to draw, choose, score or keep one translation, and the value that is looked for.
_IDLE = (
    "length_penalty", "sample", "temperature", "top_k", "top_p", "seed", "confidence", "baseline",
    "comet", "output",
)  # fmt: skip
_RATIO = re.compile(r"\bratio = ([\d.]+)")


def check_tuning(context: typer.Context) -> None:
    """Refuse what has no effect with --tune-length-penalty, or without it."""
    at = context.params
    if not at["tune_length_penalty"]:
        if at["tune_metric"] is not None:
            raise ConfigError("--tune-metric has an effect only with --tune-length-penalty.")
        return
    if at["beam"] == 1:
        raise _greedy("--beam 1")
    if idle := [*given_options(context, _IDLE), *given_choice(context)]:
        names = ", ".join(map(option_name, idle))
        raise ConfigError(f"No effect with --tune-length-penalty: {names}.")


def _greedy(why: str) -> ConfigError:
    return ConfigError(
        f"{why} is greedy search, which finds one output whatever the length penalty; tune it with "
        "a beam, such as --beam 5."
    )


def tune(context: typer.Context) -> None:
    """Translate with each length penalty, and print what they score and which is the best."""
    from mttrain import tuning

    at = context.params
    texts = read_texts(context)
    require_lines(texts)
    model = load_model(context)
    options = model.options
    if options.beam == 1:
        raise _greedy("decode.beam: 1 of the model")
    for name in at["model"]:
        _warn_of_test_text(name, texts)
    lines = texts.sources

    def progress(found: Iterator[Translation]) -> Iterator[Translation]:
        yield from shown(found, "file", len(lines))

    grid = (
        f"0 to {tuning.GRID[-1]:g} in steps of {tuning.STEP:g}, on to {tuning.MOST:g} while that "
        f"is better, then {tuning.FINE:g} around the best"
    )
    say(f"model {model_name(model.translator)}: beam {options.beam}, length penalty {grid}")
    translate, at_once = tuning.searches(model.translator, lines, options, progress)
    say("one search serves all values" if at_once else "a search for each value")
    signatures: dict[str, str] = {}

    def score(hyps: list[str]) -> dict[str, float]:
        found = _scores(context, model, hyps, texts)
        signatures.update({item.name: item.signature for item in found})
        bleu, chrf = found
        ratio = _RATIO.search(bleu.detail)
        assert ratio is not None, "sacreBLEU tells the lengths"
        return {"bleu": bleu.value, "chrf": chrf.value, "length_ratio": float(ratio[1])}

    metric = str(at["tune_metric"] or TuneMetric.bleu)
    found = tuning.tune(translate, score, options.length_penalty, metric)
    tell_doubts(found.present.texts, texts.refs[0], model.tokenizer)
    compared = _compared(context, model, found, texts)
    if at["as_json"]:
        _print_json(context, model, found, compared, signatures)
    else:
        _print_table(found, compared, signatures)
    for sentence in tuning.advice(found, compared):
        say(sentence)


def _how(context: typer.Context, model: EvalModel) -> dict[str, Any]:
    return {"tokenize": model.tokenizer, "lowercase": context.params["lowercase"]}


def _scores(
    context: typer.Context, model: EvalModel, hyps: list[str], texts: EvalTexts
) -> list[Score]:
    """BLEU and chrF."""
    from mttrain.metrics import score_corpus

    how = _how(context, model)
    return score_corpus(hyps, texts.refs, metrics=("bleu", "chrf"), **how)


def _compared(
    context: typer.Context, model: EvalModel, found: Tuning, texts: EvalTexts
) -> Comparison | None:
    """The best against the present value, on the same lines; None when that is the best."""
    from mttrain.metrics import compare_systems

    if found.best is found.present:
        return None
    (comparison,) = compare_systems(
        found.present.texts,
        found.best.texts,
        texts.refs,
        metrics=(found.metric,),
        samples=context.params["samples"] or 1000,
        **_how(context, model),
    )
    return comparison


# ---- the test set is not for tuning -------------------------------------------------------------


def _warn_of_test_text(model: str, texts: EvalTexts) -> None:
    """Warn when half of the lines or more are source lines of the test set of the model's run."""
    from mttrain.config import load_config
    from mttrain.dataset import load_raw

    config = _configuration(model)
    if config is None:
        return
    try:
        data = load_config(config).data
        if data.test is None:
            return
        tested = set(load_raw(data.test, data)[0])
    except MttrainError as error:
        say(f"The test set of {model} cannot be read, so this text may be from it: {error}")
        return
    shared = sum(line in tested for line in texts.sources)
    if 2 * shared >= len(texts.sources):
        say(
            f"warning: {shared:,} of {len(texts.sources):,} lines are in the test set of {model}: "
            "a length penalty that was chosen on a test set makes every score on it worthless; "
            "take validation text."
        )


def _configuration(model: str) -> Path | None:
    """config.yaml of the run that a model is: its directory, or that of a checkpoint or an export
    in it."""
    folder = Path(model).resolve()
    places = (folder, *folder.parents[:2])
    return next((p / "config.yaml" for p in places if (p / "config.yaml").is_file()), None)


# ---- printing -----------------------------------------------------------------------------------


def _print_table(found: Tuning, compared: Comparison | None, signatures: dict[str, str]) -> None:
    from mttrain.corpus import write_lines
    from mttrain.metrics import score_label

    lines = ["length penalty    BLEU   chrF2  hyp/ref"]
    for point in found.points:
        marks = [name for name in ("best", "present") if point is getattr(found, name)]
        figures = point.figures
        lines.append(
            f"{point.length_penalty:>14g}  {figures['bleu']:>6.2f}  {figures['chrf']:>6.2f}"
            f"  {figures['length_ratio']:>7.3f}  {', '.join(marks)}".rstrip()
        )
    lines += [f"{score_label(name)}|{signature}" for name, signature in signatures.items()]
    if compared is not None:
        lines.append(compared.text())
    write_lines(None, lines)


def _print_json(
    context: typer.Context,
    model: EvalModel,
    found: Tuning,
    compared: Comparison | None,
    signatures: dict[str, str],
) -> None:
    from mttrain.corpus import write_lines

    test_set = context.params["test_set"]
    result = {} if test_set is None else {"test_set": test_set}
    result |= model.facts() | {"lines": len(found.present.texts), "signatures": signatures}
    result["tuning"] = {
        "metric": found.metric,
        "present": found.present.length_penalty,
        "best": found.best.length_penalty,
        "table": [{"length_penalty": p.length_penalty, **p.figures} for p in found.points],
        "comparison": None if compared is None else compared.to_dict(),
    }
    write_lines(None, [json.dumps(result, ensure_ascii=False, allow_nan=False)])
