"""The commands `attention` and `positions`: pictures, word alignments and numbers of a model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

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
from mttrain.cli_options import (
    Debug,
    Device,
    Number,
    Tag,
    Threads,
    given_options,
    opt,
    search_options,
    shown,
)
from mttrain.errors import ConfigError, DataError

if TYPE_CHECKING:
    from mttrain.attention_maps import AttentionMaps, Encoded, Kind
    from mttrain.pictures import Panel, Picture
    from mttrain.translator import TranslateOptions, Translator

Shape = StrEnum("Shape", ["picture", "pharaoh", "json"])
KindChoice = StrEnum("KindChoice", ["cross", "encoder", "decoder", "all"])
Unit = StrEnum("Unit", ["word", "piece"])
TableShape = StrEnum("TableShape", ["picture", "text", "json"])


_BATCH = 64  # sentences whose weights are collected in one pass

Run = Annotated[str, typer.Argument(metavar="RUN", help="Run or checkpoint directory.")]
OutputFile = Annotated[str | None, opt("--output", "F", "Where the result goes.")]


# ---- attention --------------------------------------------------------------------------------


def attention(
    context: typer.Context,
    run: Run,
    text: Annotated[str | None, typer.Argument(metavar="TEXT", help="A source sentence.")] = None,
    target: Annotated[
        str | None, opt("--target", "TEXT", "Its translation, instead of the model's own.")
    ] = None,
    input: Annotated[
        str | None, opt("--input", "F", 'Many sentences, a line each; "-" is stdin.')
    ] = None,
    target_input: Annotated[
        str | None, opt("--target-input", "F", "With --input: their translations.")
    ] = None,
    output: OutputFile = None,
    format: Annotated[Shape, opt("--format", None, "What is made.")] = Shape.picture,
    kind: Annotated[KindChoice | None, opt("--kind", None, "Which attention (cross).")] = None,
    layer: Annotated[Number, opt("--layer", "N", "One layer, from 1.")] = None,
    head: Annotated[
        str | None, opt("--head", "N|mean", "One head, from 1, or the mean of all.")
    ] = None,
    unit: Annotated[Unit | None, opt("--unit", None, "What pharaoh links (word).")] = None,
    tag: Tag = None,
    device: Device = None,
    threads: Threads = None,
    debug: Debug = False,
) -> None:
    """Show what a translation attends to, or align its words."""
    _check_attention(context)
    from mttrain.attention_maps import KINDS

    kinds: Sequence[Kind] = KINDS if kind == KindChoice.all else (_kind(kind),)
    translator = _translator(run, device, threads)
    chosen = _Choice(translator, kinds, layer, head)
    with option_names():
        options = translator.completed(search_options(given_options(context, ("tag",)), [run]))
    if format == Shape.picture:
        assert output is not None
        maps = _maps_of_text(translator, options, text or "", target, kinds)
        _write_picture(chosen.picture(maps), output)
        return
    _write_alignments(context, translator, options, chosen)


def _check_attention(context: typer.Context) -> None:
    """Refuse what is missing, contradicts itself or has no effect, before a model is loaded."""
    at = context.params
    picture, pharaoh = at["format"] == Shape.picture, at["format"] == Shape.pharaoh
    if (at["text"] is None) == (at["input"] is None):
        raise ConfigError('Give one sentence (mttrain attention RUN "I love you.") or --input F.')
    if picture and at["input"] is not None:
        raise ConfigError("A picture shows one sentence; --input F needs --format pharaoh or json.")
    if at["target"] is not None and at["input"] is not None:
        raise ConfigError("--target belongs to one sentence; with --input use --target-input F.")
    if at["target_input"] is not None and at["input"] is None:
        raise ConfigError("--target-input has an effect only with --input.")
    if picture:
        _check_picture_name(at["output"])
    if pharaoh and at["kind"] not in (None, KindChoice.cross):
        raise ConfigError("--format pharaoh is made of cross-attention: remove --kind.")
    if at["unit"] is not None and picture:
        raise ConfigError("--unit has no effect on a picture, which shows pieces; remove it.")
    at_least("--layer", 1, at["layer"])
    at_least("--threads", 1, at["threads"], MOST_THREADS)
    must_exist(at["input"], at["target_input"])
    refuse_overwriting(at["output"], {"input file": at["input"], "target file": at["target_input"]})
    if picture:
        _require_writable(at["output"])


def _check_picture_name(output: str | None) -> None:
    if output is None or not output.lower().endswith((".png", ".svg")):
        given = "" if output is None else f" ({output} is neither)"
        raise ConfigError(f"Name the picture: --output F.svg or --output F.png{given}.")


def _require_writable(output: str) -> None:
    from mttrain.corpus import require_writable
    from mttrain.pictures import require_matplotlib

    require_matplotlib()
    require_writable(output)


def _kind(kind: KindChoice | None) -> Literal["cross", "encoder", "decoder"]:
    if kind == KindChoice.encoder:
        return "encoder"
    return "decoder" if kind == KindChoice.decoder else "cross"


def _translator(run: str, device: str | None, threads: int | None) -> Translator:
    from mttrain.translator import Translator

    return Translator.load(run, device=device or "auto", precision="fp32", threads=threads)


class _Choice:
    """Which layers and heads are shown, of all that the model has."""

    def __init__(
        self,
        translator: Translator,
        kinds: Sequence[Kind],
        layer: int | None,
        head: str | None,
    ) -> None:
        config = translator.models[0].config
        self.kinds, self.mean, self.heads = kinds, head == "mean", config.num_heads
        self.layer, self.head = layer, None
        least = min(
            config.encoder_layers if kind == "encoder" else config.decoder_layers for kind in kinds
        )
        if layer is not None and layer > least:
            raise ConfigError(f"--layer is {layer}, but there are {least} layers.")
        if head is not None and not self.mean:
            if not head.isascii() or not head.isdigit() or not 1 <= int(head) <= self.heads:
                raise ConfigError(f'--head is {head}; it must be 1 to {self.heads}, or "mean".')
            self.head = int(head)

    def weights(self, maps: dict[Kind, Any], kind: Kind) -> tuple[list[str], Any]:
        """Names of the layers, and the weights [layers, heads, T, S] that are shown."""
        found = maps[kind]
        numbers = range(1, found.shape[0] + 1)
        if self.layer is not None:
            found, numbers = found[self.layer - 1 : self.layer], range(self.layer, self.layer + 1)
        if self.head is not None:
            found = found[:, self.head - 1 : self.head]
        if self.mean:
            found = found.mean(1, keepdim=True)
        return [f"layer {number}" for number in numbers], found

    def head_names(self) -> list[str]:
        if self.mean:
            return ["mean of the heads"]
        numbers = range(1, self.heads + 1) if self.head is None else [self.head]
        return [f"head {number}" for number in numbers]

    def alignment(self, cross: Any) -> Any:
        """[L, H, T, S] -> the weights [T, S] that word alignments are read from: the mean of the
        heads of the last layer, unless another is chosen."""
        layer = cross[-1 if self.layer is None else self.layer - 1]
        return layer.mean(0) if self.head is None else layer[self.head - 1]

    def picture(self, maps: AttentionMaps) -> Picture:
        """One panel for each layer and head; kinds below each other."""
        from mttrain.pictures import Panel, heat_maps

        grid: list[list[Panel]] = []
        for kind in self.kinds:
            layers, found = self.weights(maps.weights, kind)
            rows, columns = maps.axes(kind)
            for name, heads in zip(layers, found, strict=True):
                titles = [f"{kind}, {name}, {head}" for head in self.head_names()]
                grid.append(
                    [
                        Panel(weights.numpy(), rows, columns, title)
                        for title, weights in zip(titles, heads, strict=True)
                    ]
                )
        return heat_maps(grid)


def _maps_of_text(
    translator: Translator,
    options: TranslateOptions,
    text: str,
    target: str | None,
    kinds: Sequence[Kind],
) -> AttentionMaps:
    """The maps of one sentence; what was translated is told on stderr."""
    from mttrain.attention_maps import attention_maps

    if not text.strip():
        raise DataError("The sentence is blank: there is nothing to show.")
    (pair,) = _pairs(translator, options, [text], None if target is None else [target])
    assert pair is not None
    say(f"{text} -> {translator.target_tokenizer.decode(pair.target)}")
    return attention_maps(translator, pair, kinds)


def _pairs(
    translator: Translator,
    options: TranslateOptions,
    lines: Sequence[str],
    targets: Sequence[str] | None,
) -> list[Encoded | None]:
    """What the model reads and writes for each line; None for a blank one."""
    from mttrain.attention_maps import encode_pair, encode_translation

    if targets is not None:
        return [
            encode_pair(translator, line, target, options.max_source_length, options.tag)
            if line.strip() and target.strip()
            else None
            for line, target in zip(lines, targets, strict=True)
        ]
    return [
        None if found.blank else encode_translation(translator, found, options)
        for found in translator.translate_lines(lines, options)
    ]


def _write_alignments(
    context: typer.Context, translator: Translator, options: TranslateOptions, chosen: _Choice
) -> None:
    """One line of links, or one JSON object, for each line of input."""
    from mttrain.corpus import LineWriter

    at = context.params
    output = at["output"] or "-"
    if at["input"] is not None:
        tell_waiting(at["input"])
    with LineWriter(output) as writer:
        for line in shown(_alignment_lines(at, translator, options, chosen), output):
            writer.write(line)


def _alignment_lines(
    at: dict[str, Any], translator: Translator, options: TranslateOptions, chosen: _Choice
) -> Iterator[str]:
    from mttrain.attention_maps import collect_weights

    as_json = at["format"] == Shape.json
    kinds: Sequence[Kind] = tuple(dict.fromkeys([*(chosen.kinds if as_json else ()), "cross"]))
    unit: Literal["word", "piece"] = "piece" if at["unit"] == Unit.piece else "word"
    number = 0
    for lines, targets in _blocks(at):
        pairs = _pairs(translator, options, lines, targets)
        real = [pair for pair in pairs if pair is not None]
        found = iter(collect_weights(translator.models[0], real, kinds) if real else [])
        for line, pair in zip(lines, pairs, strict=True):
            number += 1
            if pair is None:
                blank = {"line": number, "source": line, "target": "", "alignment": []}
                yield json.dumps(blank, ensure_ascii=False) if as_json else ""
                continue
            weights = next(found)
            links = _links(translator, pair, chosen.alignment(weights["cross"]), unit)
            if as_json:
                content = {"line": number, "source": line, "alignment": links}
                yield _json_line(content, translator, pair, weights, chosen)
            else:
                yield " ".join(links)


def _links(
    translator: Translator, pair: Encoded, weights: Any, unit: Literal["word", "piece"]
) -> list[str]:
    from mttrain.attention_maps import links, unit_groups, unit_weights

    source = unit_groups(translator.source_tokenizer, pair.source, unit)
    target = unit_groups(translator.target_tokenizer, pair.target, unit)
    return [f"{s}-{t}" for s, t in links(unit_weights(weights, source, target))]


def _json_line(
    content: dict[str, Any],
    translator: Translator,
    pair: Encoded,
    weights: dict[Kind, Any],
    chosen: _Choice,
) -> str:
    """The line with tokens and weights; weights are rounded to six digits behind the point."""
    target = translator.target_tokenizer
    content["target"] = target.decode(pair.target)
    content["tokens"] = {
        "source": [translator.source_tokenizer.token(index) for index in pair.source],
        "read": [target.token(index) for index in pair.read],
        "written": [target.token(index) for index in pair.target],
    }
    content["heads"] = chosen.head_names()
    content["layers"] = {kind: chosen.weights(weights, kind)[0] for kind in chosen.kinds}
    content["weights"] = {
        kind: [
            [[[round(w, 6) for w in row] for row in head] for head in layer]
            for layer in chosen.weights(weights, kind)[1].tolist()
        ]
        for kind in chosen.kinds
    }
    return json.dumps(content, ensure_ascii=False, allow_nan=False)


def _blocks(at: dict[str, Any]) -> Iterator[tuple[list[str], list[str] | None]]:
    """The lines, a batch at a time, with their given translations if there are any."""
    from mttrain.corpus import in_blocks, one_line, read_lines, read_pairs

    if at["input"] is None:
        target = at["target"]
        yield [one_line(at["text"])], None if target is None else [one_line(target)]
    elif at["target_input"] is not None:
        for pairs in in_blocks(read_pairs(at["input"], at["target_input"]), _BATCH):
            yield [pair.source for pair in pairs], [pair.target for pair in pairs]
    else:
        for lines in in_blocks(read_lines(at["input"], errors="replace"), _BATCH):
            yield lines, None


def _write_picture(picture: Picture, output: str) -> None:
    from mttrain.corpus import atomic_write_bytes

    kind: Literal["svg", "png"] = "svg" if output.lower().endswith(".svg") else "png"
    atomic_write_bytes(Path(output), picture.render(kind))


# ---- positions --------------------------------------------------------------------------------


def positions(
    d_model: Annotated[int, opt("--d-model", "N", "Columns: the width of the model.")] = 128,
    length: Annotated[int, opt("--length", "N", "Rows: positions from 0.")] = 64,
    output: OutputFile = None,
    format: Annotated[TableShape, opt("--format", None, "What is made.")] = TableShape.picture,
    debug: Debug = False,
) -> None:
    """Show the table of sinusoidal positions."""
    at_least("--d-model", 2, d_model, 8192)
    at_least("--length", 2, length, 8192)
    if format == TableShape.picture:
        _check_picture_name(output)
        assert output is not None
        _require_writable(output)
    from mttrain.model import sinusoidal_positions

    table = sinusoidal_positions(0, length, d_model)
    if format == TableShape.picture and output is not None:
        from mttrain.pictures import position_table

        _write_picture(position_table(table.numpy()), output)
        return
    from mttrain.corpus import write_lines

    products = (table.double() @ table[0].double()).tolist()
    if format == TableShape.json:
        content = {"d_model": d_model, "length": length, "table": table.tolist()}
        write_lines(output, [json.dumps(content | {"dot_product_by_distance": products})])
    else:
        write_lines(output, ("\t".join(f"{v:.6f}" for v in row) for row in table.tolist()))
