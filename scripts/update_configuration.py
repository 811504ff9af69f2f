#!/usr/bin/env python3
"""Write the tables of docs/configuration.md from the types of the settings.

    scripts/update_configuration.py        # rewrites docs/configuration.md

A table stands between `<!-- table: SECTION -->` and `<!-- end -->`; the text around the tables is
left as it is. Key, default, allowed values and the first words come from mttrain/config.py and
mttrain/dataconfig.py; `MORE` below holds what would be too long there.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
if str(PROJECT) not in sys.path:
    sys.path.insert(0, str(PROJECT))

from mttrain.schema import json_schema  # noqa: E402

PAGE = PROJECT / "docs" / "configuration.md"
TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
# Names of files and keys, and settings such as "shared: false", that a description mentions.
NAMES = re.compile(
    r"(?<![\w`.])(<\w+>|log\.jsonl|tokenizer\.json|\.tsv|\.jsonl|\.tmx|\.gz|sacrebleu:\w+|"
    r"(?:\w+\.)?[a-z]+_[a-z_]+|(?:shared|positions): \w+)(?![\w`])"
)
HEAD = "| key | default | values | meaning |\n|---|---|---|---|\n"

FORMS = {
    "data.train": "a corpus, or a list of corpora",
    "data.valid": "a corpus",
    "data.test": "a corpus or `null`",
    "fields": "two names, two numbers ≥ 1, or `null`",
    "tag": "a name, `true` or `null`",
    "optim.betas": "two numbers ≥ 0, < 1",
    "train.batch_tokens": "whole number ≥ 1, `auto` or `null`",
    "train.device": "`auto`, `cpu`, `cuda`, `cuda:N` or `mps`",
    "train.max_time": "a time such as `90m`, whole seconds, or `null`",
}
"""What no single type says."""

MORE = {
    "seed": "0 is a seed like any other.",
    "data.target_lang": "Chinese, Japanese and Korean have their own.",
    "data.max_length": "Longer pairs are skipped and counted, never cut.",
    "data.max_ratio": "Pairs above it are skipped and counted.",
    "data.workers": "The batches are the same whatever the number.",
    "data.temperature": "The higher, the more even; see [mixing](corpora.md#mixing).",
    "weight": "It may be a fraction.",
    "tag": "See [tags](corpora.md#tags).",
    "tokenizer.vocab_size": "The text may give fewer; the model takes the real size. With "
    "`shared: false` it is the size of each side.",
    "tokenizer.level": "`subword`: byte-level BPE. `character`: one token for each Unicode "
    "character that the text holds at least twice, bytes for the rest.",
    "tokenizer.path": "Nothing is learned then.",
    "model.num_heads": "Their width is d_model / num_heads.",
    "model.norm": "`post`: as in the paper. `pre`: before each block, and once more at the end of "
    "each stack; stands higher learning rates.",
    "model.positions": "`sinusoidal`: computed, for any length. `learned`: a table of "
    "`max_positions` rows.",
    "model.max_positions": "Refused with `sinusoidal`.",
    "model.tie": "`all`: source, target and output (one vocabulary needed). `target`: target and "
    "output. `none`: three matrices.",
    "optim.weight_decay": "On the matrices of the layers, not on embeddings, biases and norms.",
    "optim.schedule": "`inverse_sqrt`: lr × √(warmup / update), as in the paper. `linear` and "
    "`cosine`: down to `min_lr` at `train.max_steps`. `constant`: stays at lr.",
    "train.batch_tokens": "A longer single pair makes a batch of its own. `auto`: on a GPU the "
    "largest that is safe in memory, elsewhere the one of most tokens per second, but not so large "
    "that an epoch has fewer than ten updates; the run keeps the number.",
    "train.accumulate": "On each process; the loss is divided once, by all target tokens of the "
    "update.",
    "train.max_time": "Validations are included, and all starts of the run counted together.",
    "train.max_bad_updates": "Each was left out and its pairs named.",
    "train.valid_beam": "1 is greedy and fastest.",
    "train.best_metric": "`bleu` and `chrf`: highest wins. `nll`: the negative log-likelihood of a "
    "target token.",
    "train.average": "At most `keep_last`.",
    "train.tensorboard": "They go to `tensorboard/` in the run directory; see below.",
    "decode.length_penalty": "Larger means longer.",
}
"""Sentences that follow the description of a key."""


def tables() -> dict[str, str]:
    """Section -> the rows of its table; "top" is the top level, "corpus" a corpus."""
    schema = json_schema()
    sections = {"corpus": schema["definitions"]["corpus"]}
    top = {}
    for name, node in schema["properties"].items():
        if "properties" in node:
            sections[name] = node
        else:
            top[name] = node
    found = {"top": _table("", {**schema, "properties": top})}
    for name, node in sections.items():
        found[name] = _table("" if name == "corpus" else f"{name}.", node)
    return found


def _table(prefix: str, section: dict[str, Any]) -> str:
    required = section.get("required", ())
    return HEAD + "".join(
        _row(f"{prefix}{name}", node, name in required)
        for name, node in section["properties"].items()
    )


def _row(key: str, node: dict[str, Any], required: bool) -> str:
    default = "required" if required else f"`{_value(node['default'])}`"
    meaning = " ".join([_sentence(node["description"]), *([MORE[key]] if key in MORE else [])])
    return f"| `{key}` | {default} | {FORMS.get(key) or values(node)} | {_cell(meaning)} |\n"


def _value(value: Any) -> str:
    """A default as it would be written in the file."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, float) and 0 < abs(value) < 0.01:
        mantissa, exponent = f"{value:e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return str(value)


def values(node: dict[str, Any]) -> str:
    """Which values a key may have, in words."""
    if "enum" in node:
        *others, last = (f"`{value}`" for value in node["enum"])
        return f"{', '.join(others)} or {last}"
    if "anyOf" in node:
        kinds = [values(choice) for choice in node["anyOf"]]
        return ", ".join(kinds[:-1]) + f" or {kinds[-1]}"
    kinds = node["type"] if isinstance(node["type"], list) else [node["type"]]
    words = {
        "integer": "whole number",
        "number": "number",
        "boolean": "`true` or `false`",
        "string": "text",
        "null": "`null`",
    }
    text = words[kinds[0]] + ",".join(_bounds(node))
    return text + "".join(f" or {words[kind]}" for kind in kinds[1:])


def _bounds(node: dict[str, Any]) -> Iterator[str]:
    """ " ≥ 1", " < 3": the bounds that somebody may meet."""
    if "minimum" in node:
        yield f" ≥ {node['minimum']:g}"
    if "exclusiveMinimum" in node:
        yield f" > {node['exclusiveMinimum']:g}"
    if "maximum" in node:
        yield f" ≤ {node['maximum']:g}"
    if node.get("exclusiveMaximum", 2**63) < 2**63:
        yield f" < {node['exclusiveMaximum']:g}"


def _sentence(text: str) -> str:
    """The description as one or two sentences of the page."""
    text = re.sub(r"\b(null|auto) = ", r"`\1`: ", re.sub(r"\b([01]) = ", r"\1: ", text))
    text = NAMES.sub(r"`\1`", text)
    return f"{text[0].upper()}{text[1:].removesuffix('.')}."


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def render(page: str) -> str:
    """The page with its tables brought up to date; KeyError for one that no section has."""
    found = tables()
    named = TABLE.findall(page)
    missing = set(found) - {name for _, name, _ in named}
    if missing:
        raise KeyError(f"{PAGE.name} has no table for {', '.join(sorted(missing))}")
    return TABLE.sub(lambda match: match[1] + found[match[2]] + match[3], page)


def main() -> int:
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
