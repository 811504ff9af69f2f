"""The command `translate`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

import typer

from mttrain.cli_checks import (
    MOST_THREADS,
    at_least,
    must_exist,
    option_names,
    prefix_file_named,
    refuse_overwriting,
    say,
    tell_waiting,
)
from mttrain.cli_options import (
    Arithmetic,
    BatchSize,
    BatchTokens,
    Beam,
    Candidates,
    Debug,
    Device,
    Heat,
    Input,
    MaxLength,
    MaxSource,
    Mbr,
    MinLength,
    Models,
    NoRepeat,
    Number,
    Output,
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
    candidate_options,
    chooser,
    given_options,
    load_translator,
    opt,
    search_options,
    shown,
)
from mttrain.errors import ConfigError

Format = StrEnum("Format", ["text", "jsonl"])


def translate(
    context: typer.Context,
    model: Models = None,
    input: Input = "-",
    output: Output = "-",
    beam: Beam = None,
    nbest: Annotated[Number, opt("--nbest", "N", "Outputs per line, at most --beam.")] = None,
    scores: Annotated[bool, opt("--scores", None, "i ||| text ||| score ||| ranked")] = False,
    format: Annotated[Format, opt("--format", None, "Layout of the output.")] = Format.text,
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
    prefix: Annotated[str | None, opt("--prefix", "F", "What each output begins with.")] = None,
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
    """Translate text: as many lines out as in, in their order."""
    models = _checked(context)
    from mttrain.corpus import LineWriter, read_lines, require_writable
    from mttrain.translations import Summary, output_lines

    require_writable(output)
    wanted = search_options(given_options(context), models)
    options = candidate_options(context, wanted)
    translator = load_translator(context, options)
    with option_names():
        options = translator.completed(options)
    choose = chooser(context, translator, options)
    summary = Summary()
    tell_waiting(input)
    lines = read_lines(input, errors="replace", on_replaced=summary.replaced.append)
    prefixes = None if prefix is None else read_lines(prefix)
    with prefix_file_named(prefix), LineWriter(output) as writer:
        layout: Literal["text", "jsonl"] = "jsonl" if format == Format.jsonl else "text"
        found = choose(translator.translate_lines(lines, options, prefixes))
        for translation in shown(found, output):
            summary.add(translation)
            for line in output_lines(translation, layout=layout, nbest=wanted.nbest, scores=scores):
                writer.write(line)
            if output == "-":
                writer.flush()  # an answer is seen at once, and a closed pipe noticed
    say(summary.text())


def _checked(context: typer.Context) -> list[str]:
    """The models; refuses options that contradict each other, and files that cannot be used."""
    at = context.params
    models: list[str] = at["model"] or []
    if not models:
        raise ConfigError("Name the model: --model RUN.")
    if at["scores"] and at["format"] == Format.jsonl:
        raise ConfigError("--format jsonl always holds the scores; remove --scores.")
    at_least("--threads", 1, at["threads"], MOST_THREADS)
    must_exist(at["input"], at["prefix"])
    files = {"input file": at["input"], "prefix file": at["prefix"]}
    refuse_overwriting(at["output"], files)
    return models
