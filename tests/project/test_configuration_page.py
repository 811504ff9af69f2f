"""docs/configuration.md says what the types say."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from mttrain.schema import json_schema

PROJECT = Path(__file__).resolve().parents[2]
PAGE = PROJECT / "docs" / "configuration.md"
SCRIPT = runpy.run_path(str(PROJECT / "scripts" / "update_configuration.py"))


def test_the_page_is_up_to_date() -> None:
    """Stops a default, a bound or a key of the page from being that of an older version."""
    text = PAGE.read_text(encoding="utf-8")
    assert SCRIPT["render"](text) == text, "run scripts/update_configuration.py"


def test_prose_outside_the_tables_stays() -> None:
    """Stops the script from rewriting what people wrote, or from leaving an old table."""
    text = PAGE.read_text(encoding="utf-8")
    changed = re.sub(r"^\| `model\.norm`.*\n", "| old |\n", text, flags=re.MULTILINE)
    changed = changed.replace("## model", "## model\n\nSome prose: | a | b |")
    again = SCRIPT["render"](changed)
    assert again == text.replace("## model", "## model\n\nSome prose: | a | b |")
    with pytest.raises(KeyError, match="no table for decode"):
        SCRIPT["render"](text.replace("<!-- table: decode -->", ""))


def test_additions_belong_to_keys() -> None:
    """Stops a sentence about a key that is gone."""
    schema = json_schema()
    known = {*schema["properties"], *schema["definitions"]["corpus"]["properties"]}
    for name, node in schema["properties"].items():
        known |= {f"{name}.{key}" for key in node.get("properties", ())}
    assert set(SCRIPT["MORE"]) | set(SCRIPT["FORMS"]) <= known


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ({"type": "integer", "minimum": 1, "exclusiveMaximum": 2**63}, "whole number ≥ 1"),
        ({"type": ["number", "null"], "exclusiveMinimum": 0}, "number > 0 or `null`"),
        ({"type": "number", "minimum": 0.0, "exclusiveMaximum": 1.0}, "number ≥ 0, < 1"),
        ({"type": "string", "enum": ["a", "b", "c"]}, "`a`, `b` or `c`"),
        ({"type": "boolean"}, "`true` or `false`"),
    ],
)
def test_values_in_words(node: dict[str, Any], words: str) -> None:
    assert SCRIPT["values"](node) == words
