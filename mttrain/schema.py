"""The JSON schema of a configuration file, for editors and for programs that write such files.

It is made from the types of `config`, with their descriptions, bounds and defaults, and knows the
forms that the YAML file may have beyond the types: one corpus in place of a list, absent and empty
sections, whole numbers such as 4e3. It says nothing about files, nor about settings that only
together make no sense (d_model and num_heads): those are told by `load_config`, which refuses
whatever the schema refuses.

The dialect is draft 7, which every editor has; nothing in it means something else in later drafts.
Cost: some milliseconds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mttrain.config import RunConfig
from mttrain.corpus import load_json

SCHEMA_FILE = "mttrain.schema.json"
TITLE = "Configuration of mttrain"
_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
_ORDER = ("$schema", "title", "description", "type", "enum", "default")
_CORPUS = {"$ref": "#/definitions/corpus"}
_TEXT, _ABSENT = {"type": "string"}, {"type": "null"}
_LIMITS = ("max_steps", "max_epochs", "max_time")  # of training; one must be given

Node = dict[str, Any]


def json_schema() -> Node:
    """The schema as plain values; `schema_text` writes them."""
    raw = RunConfig.model_json_schema()
    known = raw.pop("$defs")
    root = _plain(raw, known)
    sections = root["properties"]
    for name in ("data", "train"):
        sections[name] |= {"description": raw["properties"][name]["description"]}
    root["required"] = ["run_dir", "data", "train"]
    for section in sections.values():
        if section.get("type") == "object" and section not in (sections["data"], sections["train"]):
            section["type"] = ["object", "null"]  # an empty one has all defaults
            section.pop("required", None)
    sections["train"]["anyOf"] = [
        {"required": [name], "properties": {name: {"not": _ABSENT}}} for name in _LIMITS
    ]
    sections["train"]["properties"]["average"]["not"] = {"const": 1}  # one is no mean
    _set_corpora(sections["data"]["properties"])
    root["definitions"] = {"corpus": _corpus(_plain(known["CorpusConfig"], known))}
    root |= {"$schema": "http://json-schema.org/draft-07/schema#", "title": TITLE}
    ordered: Node = _ordered(root)
    return ordered


def schema_text() -> str:
    """The schema as the text of a file."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


def is_schema(path: Path) -> bool:
    """Whether the file is such a schema, perhaps of another version, that may be replaced."""
    try:
        content = load_json(path, 1 << 20)
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("title") == TITLE


def _plain(node: Node, known: Node) -> Node:
    """A node as JSON Schema has it: bounds by their names, definitions in place, no titles."""
    node = dict(node)
    if "$ref" in node:
        found = known[node.pop("$ref").removeprefix("#/$defs/")]
        return _plain({**found, **node}, known)
    node.pop("title", None)
    for ours, theirs in _BOUNDS.items():
        if ours in node:
            node[theirs] = node.pop(ours)
    if "maximum" in node:
        node.pop("exclusiveMaximum", None)  # 2^63, the bound of every whole number
    if "properties" in node:
        node["properties"] = {
            name: _plain(field, known) for name, field in node["properties"].items()
        }
    for name in ("prefixItems", "anyOf"):
        if name in node:
            node[name] = [_plain(item, known) for item in node[name]]
    if "prefixItems" in node:
        node["items"] = node.pop("prefixItems")[0]  # both of a pair have one type
    elif "items" in node:
        node["items"] = _plain(node["items"], known)
    return _optional(node)


def _optional(node: Node) -> Node:
    """{"anyOf": [X, null]} as X with one more type, where X is no choice itself."""
    choices = [choice for choice in node.get("anyOf", ()) if choice != _ABSENT]
    if len(choices) != 1 or len(node["anyOf"]) != 2 or not isinstance(choices[0].get("type"), str):
        return node
    merged = {**choices[0], **{name: value for name, value in node.items() if name != "anyOf"}}
    merged["type"] = [merged["type"], "null"]
    return merged


def _corpus(node: Node) -> Node:
    """A corpus is two files, or one file of pairs."""
    two = {"source": _TEXT, "target": _TEXT, "pairs": _ABSENT}
    one = {"pairs": _TEXT, "source": _ABSENT, "target": _ABSENT}
    return node | {
        "anyOf": [
            {"required": ["source", "target"], "properties": two},
            {"required": ["pairs"], "properties": one},
        ]
    }


def _set_corpora(data: Node) -> None:
    """The training corpus is one or a list; the others have no weight but 1."""
    single = {"allOf": [_CORPUS, {"properties": {"weight": {"const": 1}}}]}
    several = {"type": "array", "minItems": 1, "items": _CORPUS}
    forms: dict[str, Node] = {
        "train": {"anyOf": [_CORPUS, several]},
        "valid": single,
        "test": {"anyOf": [single, _ABSENT]},
    }
    for name, form in forms.items():
        kept = {key: data[name][key] for key in ("description", "default") if key in data[name]}
        data[name] = kept | form


def _ordered(value: Any) -> Any:
    """The same with what people look for first."""
    if isinstance(value, list):
        return [_ordered(item) for item in value]
    if not isinstance(value, dict):
        return value
    first = [name for name in _ORDER if name in value]
    rest = [name for name in value if name not in first]
    return {name: _ordered(value[name]) for name in (*first, *rest)}
