"""The commands `tokenize` and `encode`."""

from __future__ import annotations

import bisect
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mttrain.cli_checks import refuse_overwriting, refuse_replacing_text, say, tell_waiting
from mttrain.cli_options import ConfigFile, Debug, Input, Number, Output, Settings, Words, opt
from mttrain.errors import CheckpointError, ConfigError, DataError

if TYPE_CHECKING:
    from mttrain.config import RunConfig
    from mttrain.tokenizer import Tokenizer

Level = StrEnum("Level", ["subword", "character"])
Side = StrEnum("Side", ["source", "target"])


# ---- tokenize ---------------------------------------------------------------------------------


def tokenize(
    files: Annotated[Words, typer.Argument(metavar="FILES", help="Text, languages mixed.")] = None,
    source: Annotated[Words, opt("--source", "F", "Source text; repeatable.")] = None,
    target: Annotated[Words, opt("--target", "F", "Target text; repeatable.")] = None,
    config: ConfigFile = None,
    settings: Settings = None,
    vocab_size: Annotated[Number, opt("--vocab-size", "N", "Tokens to learn (6000).")] = None,
    level: Annotated[Level | None, opt("--level", None, "Largest token (subword).")] = None,
    separate: Annotated[
        bool, opt("--separate", None, "--source and --target: a vocabulary for each.")
    ] = False,
    output: Annotated[
        str, opt("--output", "F", "F.json; separate ones: F.source.json, F.target.json.")
    ] = "tokenizer.json",
    debug: Debug = False,
) -> None:
    """Learn a vocabulary from text files and print how it cuts them."""
    if settings and config is None:
        raise ConfigError("--set changes a setting of --config, which is missing.")
    sources, targets = source or [], target or []
    if files and (sources or targets):
        raise ConfigError("Give FILES (one vocabulary for all), or --source and --target.")
    if separate and config is not None:
        raise ConfigError("With --config its tokenizer.shared decides; remove --separate.")
    if separate and not (sources and targets):
        raise ConfigError("--separate needs both --source and --target.")
    wanted = None if config is None else _tokenizer_settings(config, settings or [])
    if wanted is not None and not (files or sources or targets):
        sources = [corpus.source for corpus in wanted.data.train]
        targets = [corpus.target for corpus in wanted.data.train]
    if not (files or sources or targets):
        raise ConfigError(
            "There is no text to learn from; give FILES, --source/--target, --config."
        )
    defaults = None if wanted is None else wanted.tokenizer
    size = defaults.vocab_size if defaults else 6000
    if vocab_size is not None:
        size = vocab_size
    unit = level.value if level else defaults.level if defaults else "subword"
    if not separate and (defaults is None or defaults.shared):
        _learn({Path(output): [*(files or []), *sources, *targets]}, size, unit)
        return
    if not (sources and targets):
        raise ConfigError(f"{config} says shared: false; give both --source and --target.")
    texts = {"source": sources, "target": targets}
    _learn({_side_path(Path(output), side): texts[side] for side in texts}, size, unit)


def _tokenizer_settings(config: str, settings: list[str]) -> RunConfig:
    from mttrain.config import load_config

    loaded = load_config(config, settings)
    if loaded.tokenizer.path or loaded.tokenizer.source_path:
        raise ConfigError(f"{config} names an existing tokenizer: there is nothing to learn.")
    return loaded


def _side_path(path: Path, side: str) -> Path:
    """tokenizer.json -> tokenizer.source.json"""
    return path.with_name(f"{path.stem}.{side}{path.suffix or '.json'}")


def _learn(wanted: dict[Path, list[str]], size: int, level: Any) -> None:
    """Learn a vocabulary for each path from the files named with it."""
    from mttrain.corpus import read_lines, require_writable

    for output in wanted:
        for file in itertools.chain(*wanted.values()):
            refuse_overwriting(output, {"input file": file})
        refuse_replacing_text(output)
        require_writable(output)
    # Learning and reporting both need the text, and what is no file (stdin, a pipe of the shell)
    # can be read only once.
    names = dict.fromkeys(file for files in wanted.values() for file in files)
    pipes = [name for name in names if name == "-" or not os.path.isfile(name)]
    kept = {name: list(read_lines(name)) for name in pipes}
    for output, files in wanted.items():
        _learn_one(files, kept, size, level, output)


def _learn_one(
    files: list[str], kept: dict[str, list[str]], size: int, level: Any, output: Path
) -> None:
    """Learn, save, and print the report on the text learned from."""
    from mttrain.corpus import path_name, read_lines, write_lines
    from mttrain.tokenizer import tokenizer_report, train_tokenizer

    ends: list[int] = []  # for each file the number of its last line, counted through all

    def lines() -> Iterator[str]:
        ends.clear()
        count = 0
        for file in files:
            for line in kept[file] if file in kept else read_lines(file):
                count += 1
                yield line
            ends.append(count)

    tokenizer = train_tokenizer(lines(), vocab_size=size, level=level)
    tokenizer.save(output)
    if tokenizer.size < size:
        say(f"The text gives {tokenizer.size} tokens, not {size}: no more pairs occur twice.")
    report = tokenizer_report(tokenizer, lines())
    at = bisect.bisect_left(ends, report.longest_line)
    number = report.longest_line - (ends[at - 1] if at else 0)
    table = report.text(f"{path_name(files[at])}, line {number}").split("\n")
    write_lines(None, [f"{output}, learned from {', '.join(map(path_name, files))}", *table])


# ---- encode -----------------------------------------------------------------------------------


def encode(
    model: Annotated[
        str | None, opt("--model", "RUN", "Run, checkpoint or tokenizer.json.")
    ] = None,
    side: Annotated[Side | None, opt("--side", None, "Whose vocabulary (source).")] = None,
    ids: Annotated[bool, opt("--ids", None, "Numbers instead of pieces.")] = False,
    decode: Annotated[bool, opt("--decode", None, "From pieces or --ids back to text.")] = False,
    input: Input = "-",
    output: Output = "-",
    debug: Debug = False,
) -> None:
    """Show the pieces of each line of a text."""
    if model is None:
        raise ConfigError("Name the model: --model RUN.")
    from mttrain.corpus import LineWriter, path_name, read_lines
    from mttrain.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(_tokenizer_file(model, side))
    convert = _decoder(tokenizer, ids) if decode else _encoder(tokenizer, ids)
    refuse_overwriting(output, {"input file": input})
    tell_waiting(input)
    with LineWriter(output) as writer:
        for number, line in enumerate(read_lines(input), start=1):
            try:
                text = convert(line)
            except _BadToken as error:
                raise DataError(f"{path_name(input)}, line {number}: {error}") from None
            writer.write(text)
            if output == "-" and sys.stdout.isatty():
                writer.flush()


def _tokenizer_file(model: str, side: Side | None) -> Path:
    """The file itself, or that of the checkpoint which `translate` would take."""
    from mttrain.rundir import resolve_model

    if os.path.isfile(model):
        if side is not None:
            raise ConfigError(f"{model} is one vocabulary: --side has no effect; remove it.")
        return Path(model)
    folder = resolve_model(model)
    for name in ("tokenizer.json", f"tokenizer.{side or Side.source}.json"):
        if (folder / name).is_file():
            return folder / name
    raise CheckpointError(f"{folder} holds no tokenizer.json: the checkpoint is incomplete.")


class _BadToken(ValueError):
    """A word of the input of --decode is no token."""


def _encoder(tokenizer: Tokenizer, ids: bool) -> Callable[[str], str]:
    if ids:
        return lambda line: " ".join(map(str, tokenizer.encode(line)))
    return lambda line: " ".join(tokenizer.pieces(line))


def _decoder(tokenizer: Tokenizer, ids: bool) -> Callable[[str], str]:
    def number(word: str) -> int:
        index = int(word) if ids and word.isascii() and word.isdecimal() else None
        if not ids:
            index = tokenizer.piece_id(word)
        if index is None or index >= tokenizer.size:
            kind = f"token number (0 to {tokenizer.size - 1})" if ids else "piece of the vocabulary"
            raise _BadToken(f"{word[:40]!r} is no {kind}.")
        return index

    return lambda line: tokenizer.decode([number(word) for word in line.split()])
