"""The command `export`: a model as a directory that another program loads."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mttrain.cli_checks import must_exist, say
from mttrain.cli_options import Debug, opt
from mttrain.errors import ConfigError, DataError

if TYPE_CHECKING:
    from mttrain.exporting import ExportReport

Target = StrEnum("Target", ["ctranslate2", "huggingface"])


def export(
    model: Annotated[str, typer.Argument(metavar="RUN", help="Run or checkpoint directory.")],
    output: Annotated[str, typer.Argument(metavar="DIR", help="Directory to make.")],
    to: Annotated[Target | None, opt("--to", None, "The program that is to load it.")] = None,
    quantization: Annotated[
        str | None, opt("--quantization", "Q", "With --to ctranslate2: type of the weights.")
    ] = None,
    lines: Annotated[
        str | None, opt("--lines", "F", "Source text to compare on (validation text).")
    ] = None,
    replace: Annotated[bool, opt("--replace", None, "Replace an earlier export.")] = False,
    as_json: Annotated[bool, opt("--json", None, "Print the report as one JSON object.")] = False,
    debug: Debug = False,
) -> None:
    """Write a model for CTranslate2 or Hugging Face."""
    if sys.stdout is None:
        raise DataError("Standard output is closed; the report goes there.")
    if to is None:
        raise ConfigError("Name the format: --to ctranslate2 or --to huggingface.")
    if quantization is not None and to != Target.ctranslate2:
        raise ConfigError("--quantization has an effect only with --to ctranslate2.")
    must_exist(lines)
    report = _exported(model, Path(output), to, quantization, lines, replace)
    from mttrain.corpus import write_lines

    if as_json:
        write_lines(None, [json.dumps(report.to_dict(), ensure_ascii=False, allow_nan=False)])
        return
    write_lines(None, report.text().split("\n"))


def _exported(
    model: str, output: Path, to: Target, quantization: str | None, given: str | None, replace: bool
) -> ExportReport:
    from mttrain.exporting import check_lines

    text = check_lines(model, given)
    say(f"comparing translations of {len(text)} lines before {output} gets its name")
    if to == Target.ctranslate2:
        from mttrain.ct2 import export_ctranslate2

        return export_ctranslate2(
            model, output, quantization=quantization, lines=text, replace=replace
        )
    from mttrain.huggingface import export_huggingface

    return export_huggingface(model, output, lines=text, replace=replace)
