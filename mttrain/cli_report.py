"""The command `report`: one HTML page on a run, or on several side by side."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

from mttrain.cli_checks import MOST_THREADS, at_least, say
from mttrain.cli_options import Debug, Device, Threads, opt, shown
from mttrain.errors import ConfigError

Split = StrEnum("Split", ["valid", "test"])


def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Directories of runs.")],
    output: Annotated[
        str, opt("--output", "F", "The page; report.html unless given.")
    ] = "report.html",
    lines: Annotated[
        int, opt("--lines", "N", "Lines that are translated at most; 0: none.")
    ] = 1000,
    split: Annotated[
        Split | None, opt("--split", None, "Which set is translated (test, if there is one).")
    ] = None,
    as_json: Annotated[bool, opt("--json", None, "Print the scores as one JSON object.")] = False,
    device: Device = None,
    threads: Threads = None,
    debug: Debug = False,
) -> None:
    """Write one HTML page on a run, or on several side by side."""
    at_least("--lines", 0, lines)
    at_least("--threads", 1, threads, MOST_THREADS)
    if output == "-" or not output.lower().endswith((".html", ".htm")):
        raise ConfigError(f"--output is {output}; name a file that ends in .html.")
    if lines == 0 and split is not None:
        raise ConfigError("--lines 0 translates nothing, so --split has no effect; remove one.")
    if len({Path(run).resolve() for run in runs}) < len(runs):
        raise ConfigError("One run is named twice.")
    from mttrain.corpus import atomic_write_text, require_writable, write_lines
    from mttrain.pictures import require_matplotlib
    from mttrain.report import chosen_split, labels, load_run, translate_run
    from mttrain.report_page import page, require_jinja

    require_matplotlib()
    require_jinja()
    require_writable(output)
    found = [load_run(path, label) for path, label in zip(runs, labels(runs), strict=True)]
    wanted: Literal["valid", "test"] | None = None
    if split is not None:
        wanted = "test" if split == Split.test else "valid"
    splits = [chosen_split(run, wanted) for run in found]
    if wanted is None and "valid" in splits:
        splits = ["valid"] * len(splits)  # one set for all, or nothing could be compared
    translated = [
        translate_run(
            run,
            which,
            lines,
            device=device or "auto",
            threads=threads,
            progress=lambda items: shown(items, "file"),
        )
        for run, which in zip(found, splits, strict=True)
    ]
    atomic_write_text(output, page(found, translated))
    for run in found:
        for note in run.notes:
            say(f"{run.label}: {note}")
    say(f"the report is in {output}")
    if as_json:
        content = [
            {"run": str(run.path), "scores": [s.to_dict() for s in one.scores] if one else []}
            for run, one in zip(found, translated, strict=True)
        ]
        result = {"output": output, "runs": content}
        write_lines(None, [json.dumps(result, ensure_ascii=False, allow_nan=False)])
