"""The commands `score` and `average`."""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mttrain.cli_checks import (
    MOST_THREADS,
    at_least,
    must_exist,
    option_names,
    refuse_overwriting,
    say,
    tell_waiting,
)
from mttrain.cli_decode import Format
from mttrain.cli_eval_text import model_languages
from mttrain.cli_options import (
    Arithmetic,
    Debug,
    Device,
    Fields,
    Langs,
    MaxSource,
    Models,
    Number,
    Output,
    PairsFile,
    Tag,
    Threads,
    Words,
    load_translator,
    named_pairs,
    opt,
    shown,
)
from mttrain.errors import ConfigError

if TYPE_CHECKING:
    from mttrain.corpus import Pair
    from mttrain.pairs import ParallelText
    from mttrain.translator import ForcedScore, Translator


# ---- score ------------------------------------------------------------------------------------


def score(
    context: typer.Context,
    model: Models = None,
    source: Annotated[str | None, opt("--source", "F", "The text.")] = None,
    target: Annotated[str | None, opt("--target", "F", "Its translations.")] = None,
    pairs: PairsFile = None,
    langs: Langs = None,
    fields: Fields = None,
    tokens: Annotated[bool, opt("--tokens", None, "The score of each token, too.")] = False,
    normalize: Annotated[bool, opt("--normalize", None, "Divide by the number of tokens.")] = False,
    output: Output = "-",
    format: Annotated[Format, opt("--format", None, "Layout of the output.")] = Format.text,
    as_json: Annotated[bool, opt("--json", None, "Print the totals as one JSON object.")] = False,
    tag: Tag = None,
    max_source_length: MaxSource = None,
    batch_tokens: Annotated[
        Number, opt("--batch-tokens", "N", "Padded tokens of a batch: pairs x longest side.")
    ] = None,
    device: Device = None,
    precision: Arithmetic = None,
    threads: Threads = None,
    debug: Debug = False,
) -> None:
    """Print the log-probabilities of given translations."""
    _check_score(context)
    text = _text(context)
    total = _counted(text)
    from mttrain.corpus import LineWriter, require_writable

    require_writable(output)
    if as_json:
        require_writable("-")
    translator = load_translator(context)
    totals = _Totals()
    how: dict[str, Any] = {"max_source_length": max_source_length, "tag": tag}
    if batch_tokens is not None:
        how["batch_tokens"] = batch_tokens
    for file in text.files:
        tell_waiting(file)
    silent = as_json and output == "-"
    layout = _jsonl if format == Format.jsonl else _line
    with option_names(), LineWriter(os.devnull if silent else output) as writer:
        for scored in shown(_scored(translator, text.pairs(), tokens, how), output, total):
            totals.add(scored)
            writer.write(layout(scored, tokens, normalize))
            if output == "-" and totals.lines % _WINDOW == 0:
                writer.flush()
    say(totals.text())
    if as_json:
        from mttrain.corpus import write_lines

        names = [str(member.path) for member in translator.members]
        content = {"model": names, "text": list(text.files), **totals.to_dict()}
        write_lines(None, [json.dumps(content, ensure_ascii=False, allow_nan=False)])


_WINDOW = 2048  # pairs in memory at a time


def _check_score(context: typer.Context) -> None:
    """Refuse what is missing, contradicts itself or has no effect; tell of missing files."""
    at = context.params
    if not at["model"]:
        raise ConfigError("Name the model: --model RUN.")
    files = [at["source"], at["target"]]
    if at["pairs"] is not None and any(files):
        raise ConfigError("--pairs holds both sides; remove --source and --target.")
    if at["pairs"] is None and None in files:
        raise ConfigError("Name the text: --source F and --target F, or --pairs F.")
    if at["pairs"] is None and (at["langs"] is not None or at["fields"] is not None):
        raise ConfigError("--langs and --fields have an effect only with --pairs.")
    if at["normalize"] and at["format"] == Format.jsonl:
        raise ConfigError("--format jsonl always holds the mean; remove --normalize.")
    if at["as_json"] and at["output"] == "-":
        idle = [name for name in ("tokens", "normalize") if at[name]]
        idle += ["format"] if at["format"] == Format.jsonl else []
        if idle:
            listed = ", ".join(f"--{name}" for name in idle)
            raise ConfigError(f"--json prints the totals alone; {listed} needs --output F.")
    at_least("--threads", 1, at["threads"], MOST_THREADS)
    at_least("--batch-tokens", 1, at["batch_tokens"])
    at_least("--max-source-length", 2, at["max_source_length"])
    pairs = None if (at["pairs"] or "").startswith("sacrebleu:") else at["pairs"]
    must_exist(*files, pairs)
    names = {"source file": files[0], "target file": files[1], "file of --pairs": pairs}
    refuse_overwriting(at["output"], names)


def _text(context: typer.Context) -> ParallelText:
    from mttrain.pairs import ParallelText

    at = context.params
    if at["pairs"] is None:
        return ParallelText((at["source"], at["target"]), ("source", "target"))
    one, two, _ = model_languages(at["model"][0], at["tag"])
    known = None if one is None or two is None else (one, two)
    return named_pairs(at["pairs"], at["langs"], at["fields"], known)


def _counted(text: ParallelText) -> int | None:
    """The number of pairs: two files that are out of step cost a second, not hours of scoring.

    None for a pipe, which can be read only once.
    """
    if not all(map(os.path.isfile, text.files)):
        return None
    return sum(1 for _ in text.required_pairs())


@dataclass(frozen=True, slots=True)
class _Scored:
    """A pair and its score; None: the source is blank, so that no model reads it."""

    pair: Pair
    score: ForcedScore | None
    pieces: tuple[str, ...] = ()

    @property
    def value(self) -> float:
        """0 for a blank target of a blank source, as `translate` has it; otherwise not a number."""
        if self.score is not None:
            return self.score.sum
        return math.nan if self.pair.target.strip() else 0.0

    @property
    def tokens(self) -> int:
        return 0 if self.score is None else self.score.tokens

    @property
    def mean(self) -> float:
        return self.value / max(self.tokens, 1)

    @property
    def flags(self) -> list[str]:
        if self.score is None:
            return ["blank"]
        return ["cut"] if self.score.cut else []


def _scored(
    translator: Translator, pairs: Iterator[Pair], each: bool, how: dict[str, Any]
) -> Iterator[_Scored]:
    """The pairs with their scores, window by window."""
    from mttrain.errors import DataError

    while window := list(itertools.islice(pairs, _WINDOW)):
        read = [pair for pair in window if pair.source.strip()]
        texts = [(pair.source, pair.target) for pair in read]
        try:
            found = iter(translator.score(texts, each=each, **how))
        except DataError as error:
            raise DataError(f"After line {window[0].line - 1}: {error}") from None
        for pair in window:
            score = next(found) if pair.source.strip() else None
            pieces: tuple[str, ...] = ()
            if score is not None:
                pieces = tuple(map(translator.target_tokenizer.token, score.ids))
            yield _Scored(pair, score, pieces)


def _line(scored: _Scored, tokens: bool, normalize: bool) -> str:
    value = scored.mean if normalize else scored.value
    if not tokens:
        return f"{value:.6f}"
    each = () if scored.score is None else scored.score.each
    numbers = " ".join(f"{number:.6f}" for number in each)
    return f"{value:.6f} ||| {' '.join(scored.pieces)} ||| {numbers}"


def _jsonl(scored: _Scored, tokens: bool, _: bool) -> str:
    pair = scored.pair
    known = math.isfinite(scored.value)
    content: dict[str, Any] = {"line": pair.line, "source": pair.source, "target": pair.target}
    content |= {"score": scored.value if known else None, "mean": scored.mean if known else None}
    content |= {"tokens": scored.tokens, "flags": scored.flags}
    if tokens:
        each = [] if scored.score is None else list(scored.score.each)
        content |= {"pieces": list(scored.pieces), "log_probs": each}
    return json.dumps(content, ensure_ascii=False, allow_nan=False)


@dataclass(slots=True)
class _Totals:
    """Sums over all pairs that were scored, and what deserves a look."""

    started: float = field(default_factory=time.perf_counter)
    lines: int = 0
    tokens: int = 0
    log_prob: float = 0.0
    blank: list[int] = field(default_factory=list)  # line numbers, here and below
    unread: list[int] = field(default_factory=list)
    cut: list[int] = field(default_factory=list)

    def add(self, scored: _Scored) -> None:
        """Count one pair."""
        self.lines += 1
        if scored.score is None:
            numbers = self.unread if scored.pair.target.strip() else self.blank
            numbers.append(scored.pair.line)
            return
        self.tokens += scored.score.tokens
        self.log_prob += scored.score.sum
        if scored.score.cut:
            self.cut.append(scored.pair.line)

    @property
    def nll(self) -> float:
        """Mean negative log-likelihood in nats per token, EOS included."""
        return -self.log_prob / max(self.tokens, 1)

    def text(self) -> str:
        """One line on the whole, then one for each kind of trouble there was."""
        from mttrain.metrics import perplexity
        from mttrain.translations import lines_warning

        seconds = time.perf_counter() - self.started
        blank = f", {len(self.blank)} of them blank" if self.blank else ""
        lines = [
            f"{self.lines:,} pairs{blank}, {self.tokens:,} tokens (EOS included), in "
            f"{seconds:.1f} s: log-probability {self.log_prob:.2f}, NLL {self.nll:.4f} nats per "
            f"token, perplexity {perplexity(self.nll):.2f}"
        ]
        for numbers, what in (
            (self.unread, "had a blank source and a target; no model reads it: not scored"),
            (self.cut, "went beyond the limit; the score is that of what was left"),
        ):
            if numbers:
                lines.append(lines_warning(numbers, what))
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        from mttrain.metrics import perplexity

        ratio = perplexity(self.nll)
        return {
            "pairs": self.lines,
            "blank_pairs": len(self.blank),
            "unscored_pairs": len(self.unread),
            "cut_pairs": len(self.cut),
            "tokens": self.tokens,
            "log_probability": self.log_prob,
            "nll": self.nll,
            "perplexity": ratio if math.isfinite(ratio) else None,
            "seconds": round(time.perf_counter() - self.started, 3),
        }


# ---- average ----------------------------------------------------------------------------------


def average(
    checkpoints: Annotated[
        Words, typer.Argument(metavar="CHECKPOINT...", help="Checkpoints, or one run.")
    ] = None,
    last: Annotated[Number, opt("--last", "N", "Of a run: its N newest checkpoints.")] = None,
    best: Annotated[Number, opt("--best", "N", "Of a run: its N best checkpoints.")] = None,
    output: Annotated[str | None, opt("--output", "DIR", "The new checkpoint directory.")] = None,
    as_json: Annotated[bool, opt("--json", None, "Print one JSON object.")] = False,
    debug: Debug = False,
) -> None:
    """Average several checkpoints into a new one."""
    names = checkpoints or []
    if output is None:
        raise ConfigError("Name the directory to be written: --output DIR.")
    if last is not None and best is not None:
        raise ConfigError("Give --last or --best, not both.")
    at_least("--last", 2, last)
    at_least("--best", 2, best)
    if (last is not None or best is not None) and len(names) != 1:
        raise ConfigError("--last and --best choose from one run: give its directory alone.")
    if last is None and best is None and len(names) < 2:
        raise ConfigError("Give two checkpoints or more, or a run with --last N or --best N.")
    from mttrain.averaging import average_into, check_output, chosen_checkpoints

    check_output(Path(output))
    if last is None and best is None:
        from mttrain.rundir import resolve_model

        folders = [resolve_model(name) for name in names]
    else:
        folders = chosen_checkpoints(Path(names[0]), last=last, best=best)
    made = average_into(folders, Path(output))
    for warning in made.warnings:
        say(f"warning: {warning}")
    say(f"the average of {len(folders)} checkpoints; score it with: mttrain eval --model {output}")
    from mttrain.corpus import write_lines

    plain = {"output": output, "parameters": made.parameters, "averaged": made.members}
    write_lines(None, [json.dumps(plain, ensure_ascii=False) if as_json else output])
