"""The commands `tokenize` and `encode`."""

from __future__ import annotations

import bisect
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mttrain.cli_checks import (
    on_terminal,
    refuse_overwriting,
    refuse_replacing_text,
    say,
    tell_waiting,
)
from mttrain.cli_decode import Format
from mttrain.cli_options import (
    ConfigFile,
    Debug,
    Input,
    Number,
    Output,
    Settings,
    Words,
    opt,
    shown,
)
from mttrain.errors import CheckpointError, ConfigError, DataError

if TYPE_CHECKING:
    from mttrain.config import RunConfig
    from mttrain.tokenizer import Tokenizer
    from mttrain.tokenreport import TokenizerReport

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
    tag: Annotated[Words, opt("--tag", "NAME", "An entry <NAME> for sources; repeatable.")] = None,
    separate: Annotated[
        bool, opt("--separate", None, "--source and --target: a vocabulary for each.")
    ] = False,
    output: Annotated[
        str, opt("--output", "F", "F.json; separate ones: F.source.json, F.target.json.")
    ] = "tokenizer.json",
    as_json: Annotated[bool, opt("--json", None, "Print one JSON object.")] = False,
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
    texts = {"source": _plain([*(files or []), *sources]), "target": _plain(targets)}
    if wanted is not None and not (files or sources or targets):
        texts = {side: _training_text(wanted, side) for side in texts}
    if not (texts["source"] or texts["target"]):
        raise ConfigError(
            "There is no text to learn from; give FILES, --source/--target, --config."
        )
    tags = _tags(tag or [], wanted)
    defaults = None if wanted is None else wanted.tokenizer
    size = defaults.vocab_size if defaults else 6000
    if vocab_size is not None:
        size = vocab_size
    unit = level.value if level else defaults.level if defaults else "subword"
    if not separate and (defaults is None or defaults.shared):
        _learn({Path(output): [*texts["source"], *texts["target"]]}, tags, size, unit, as_json)
        return
    if files or not all(texts.values()):
        raise ConfigError(f"{config} says shared: false; give both --source and --target.")
    paths = {_side_path(Path(output), side): texts[side] for side in texts}
    _learn(paths, tags, size, unit, as_json)


@dataclass(frozen=True, slots=True)
class _Text:
    """Lines to learn from, which are read twice: to learn, and to report."""

    name: str
    file: str
    lines: Callable[[], Iterable[str]]


def _plain(files: Sequence[str]) -> list[_Text]:
    from mttrain.corpus import path_name, read_lines

    return [_Text(path_name(file), file, partial(read_lines, file)) for file in files]


def _training_text(config: RunConfig, side: str) -> list[_Text]:
    """One side of each training corpus of a configuration."""
    from mttrain.pairs import parallel_text

    texts = []
    for corpus in config.data.train:
        for text in parallel_text(corpus, config.data).shards():
            file = text.files[side == "target"] if len(text.files) > 1 else text.files[0]
            name = file if len(text.files) > 1 else f"{file} ({side})"
            texts.append(_Text(name, file, partial(text.side, side)))
    return texts


def _tokenizer_settings(config: str, settings: list[str]) -> RunConfig:
    from mttrain.config import load_config

    loaded = load_config(config, settings)
    if loaded.tokenizer.path or loaded.tokenizer.source_path:
        raise ConfigError(f"{config} names an existing tokenizer: there is nothing to learn.")
    return loaded


def _tags(names: Sequence[str], config: RunConfig | None) -> list[str]:
    """The tags of --tag and of the configuration's training corpora."""
    from mttrain.tags import name_problem

    for name in names:
        problem = name_problem(name)
        if problem is not None:
            raise ConfigError(f"--tag {name}: {problem}.")
    known = {} if config is None else config.data.train_tags()
    return list(dict.fromkeys([*known, *names]))


def _side_path(path: Path, side: str) -> Path:
    """tokenizer.json -> tokenizer.source.json"""
    return path.with_name(f"{path.stem}.{side}{path.suffix or '.json'}")


def _learn(
    wanted: Mapping[Path, Sequence[_Text]],
    tags: Sequence[str],
    size: int,
    level: Any,
    as_json: bool,
) -> None:
    """Learn a vocabulary for each path from the texts named with it, and print the reports.

    The first has the tags: it is that of the sources.
    """
    from mttrain.corpus import require_writable, write_lines

    for output in wanted:
        for text in itertools.chain(*wanted.values()):
            refuse_overwriting(output, {"input file": text.file})
        refuse_replacing_text(output)
        require_writable(output)
    if as_json:
        require_writable("-")  # known before the work
    # Learning and reporting both need the text, and what is no file (stdin, a pipe of the shell)
    # can be read only once.
    kept = {
        text.file: list(text.lines())
        for text in dict.fromkeys(itertools.chain(*wanted.values()))
        if text.file == "-" or not os.path.isfile(text.file)
    }
    results = []
    for output, texts in wanted.items():
        lines = [partial(iter, kept[t.file]) if t.file in kept else t.lines for t in texts]
        names = [text.name for text in texts]
        result, table = _learn_one(names, lines, size, level, tags, output)
        tags = ()
        results.append(result)
        if not as_json:
            write_lines(None, table)
    if as_json:
        write_lines(None, [json.dumps({"vocabularies": results}, ensure_ascii=False)])


def _learn_one(
    names: Sequence[str],
    texts: Sequence[Callable[[], Iterable[str]]],
    size: int,
    level: Any,
    tags: Sequence[str],
    output: Path,
) -> tuple[dict[str, Any], list[str]]:
    """Learn and save; the report on the text learned from, for JSON and as lines."""
    from mttrain.tags import tag_token
    from mttrain.tokenizer import train_tokenizer
    from mttrain.tokenreport import tokenizer_report

    ends: list[int] = []  # for each text the number of its last line, counted through all

    def lines(then: str = "") -> Iterator[str]:
        ends.clear()
        count = 0
        for text in texts:
            for line in text():
                count += 1
                yield line
            ends.append(count)
        if then and on_terminal(sys.stderr):
            say(f"{count:,} lines are read; {then}")

    tokenizer = train_tokenizer(
        shown(lines(f"learning {size:,} tokens"), "file"), vocab_size=size, level=level, tags=tags
    )
    tokenizer.save(output)
    if tokenizer.size < size:
        say(f"The text gives {tokenizer.size} tokens, not {size}: no more pairs occur twice.")
    report = tokenizer_report(tokenizer, shown(lines(), "file"))
    at = bisect.bisect_left(ends, report.longest_line)
    longest = {"text": names[at], "line": report.longest_line - (ends[at - 1] if at else 0)}
    table = report.text(f"{longest['text']}, line {longest['line']}").split("\n")
    head = f"{output}, learned from {', '.join(names)}"
    if tags:
        head += f", with {' '.join(map(tag_token, tags))}"
    return _report_values(tokenizer, report, output, names, longest), [head, *table]


def _report_values(
    tokenizer: Tokenizer,
    report: TokenizerReport,
    output: Path,
    names: Sequence[str],
    longest: Mapping[str, Any],
) -> dict[str, Any]:
    values = asdict(report) | {"longest_line": longest}
    return {
        "output": str(output),
        "learned_from": list(names),
        "hash": tokenizer.hash,
        "tags": list(tokenizer.tags),
        **values,
        "tokens_per_word": report.tokens_per_word,
        "tokens_per_character": report.tokens_per_character,
    }


# ---- encode -----------------------------------------------------------------------------------


def encode(
    model: Annotated[
        str | None, opt("--model", "RUN", "Run, checkpoint or tokenizer.json.")
    ] = None,
    side: Annotated[Side | None, opt("--side", None, "Whose vocabulary (source).")] = None,
    ids: Annotated[bool, opt("--ids", None, "Numbers instead of pieces.")] = False,
    decode: Annotated[bool, opt("--decode", None, "From pieces or --ids back to text.")] = False,
    format: Annotated[Format, opt("--format", None, "Layout of the output.")] = Format.text,
    input: Input = "-",
    output: Output = "-",
    debug: Debug = False,
) -> None:
    """Show the pieces of each line of a text."""
    if model is None:
        raise ConfigError("Name the model: --model RUN.")
    if format == Format.jsonl and ids and not decode:
        raise ConfigError("--format jsonl always holds pieces and ids; remove --ids.")
    from mttrain.corpus import LineWriter, path_name, read_lines
    from mttrain.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(tokenizer_file(model, side))
    convert = _decoded(tokenizer, ids) if decode else tokenizer.encode
    write = _written(tokenizer, format, ids, decode)
    refuse_overwriting(output, {"input file": input})
    tell_waiting(input)
    with LineWriter(output) as writer:
        for number, line in enumerate(shown(read_lines(input), output), start=1):
            try:
                found = convert(line)
            except _BadToken as error:
                raise DataError(f"{path_name(input)}, line {number}: {error}") from None
            writer.write(write(number, line, found))
            if output == "-" and sys.stdout.isatty():
                writer.flush()


def tokenizer_file(model: str, side: Side | None) -> Path:
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


def _decoded(tokenizer: Tokenizer, ids: bool) -> Callable[[str], list[int]]:
    """What reads a line of pieces or numbers."""

    def number(word: str) -> int:
        index = int(word) if ids and word.isascii() and word.isdecimal() else None
        if not ids:
            index = tokenizer.piece_id(word)
        if index is None or index >= tokenizer.size:
            kind = f"token number (0 to {tokenizer.size - 1})" if ids else "piece of the vocabulary"
            raise _BadToken(f"{word[:40]!r} is no {kind}.")
        return index

    return lambda line: [number(word) for word in line.split()]


def _written(
    tokenizer: Tokenizer, format: Format, ids: bool, decode: bool
) -> Callable[[int, str, list[int]], str]:
    """What makes a line of output from its number, the line of input and its ids."""

    def as_json(number: int, line: str, found: list[int]) -> str:
        text = tokenizer.decode(found) if decode else line
        pieces = [tokenizer.token(index) for index in found]
        content = {"line": number, "text": text, "pieces": pieces, "ids": found}
        return json.dumps(content, ensure_ascii=False)

    if format == Format.jsonl:
        return as_json
    if decode:
        return lambda number, line, found: tokenizer.decode(found)
    word: Callable[[int], str] = str if ids else tokenizer.token
    return lambda number, line, found: " ".join(map(word, found))
