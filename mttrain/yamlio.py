"""YAML in and out, with the line of every value and without YAML's surprises.

A document becomes plain Python values and a table that names the file and line of each of them, so
that a message can point at the key it is about. PyYAML is used up to its node graph; the values are
resolved here, by rules narrower than YAML 1.1:

- a number is decimal: `3`, `-0.5`, `.1`, `1e-4`, `4e3`. What older readers take for octal (`010`),
  base 60 (`1:30`), grouped digits (`4_096`), hexadecimal or a date stays the text that it is;
- `true`, `false`, `yes`, `no`, `on`, `off`, `y`, `n` are booleans, empty, `~` and `null` are None;
- quoted scalars are always text; keys are always text, as written;
- repeated keys, tags (`!!python/...`), anchors and aliases are refused.

Cost: PyYAML's pure Python scanner, about 1 ms for a configuration file.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

KeyPath = tuple[str | int, ...]
"""Where a value stands: keys of mappings and indices of lists, from the top of the document."""

_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,18})")  # at most 19 digits: about 64 bits
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]{1,4})?")
_DIGITS = re.compile(r"[-+]?[0-9]+")
_TRUE = frozenset({"true", "yes", "on", "y"})
_FALSE = frozenset({"false", "no", "off", "n"})
_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_INFINITE = {".inf": float("inf"), "+.inf": float("inf"), "-.inf": float("-inf"),
             ".nan": float("nan")}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Place:
    """Names lines: "run.yaml:12", or for a text without lines only "--set optim.lr"."""

    name: str
    lines: bool = True

    def __call__(self, line: int, column: int | None = None) -> str:
        numbers = [self.name, line] + ([] if column is None else [column])
        return ":".join(map(str, numbers)) if self.lines else self.name


class YamlProblem(ValueError):
    """The text is not YAML that can be read; the message is one line and names the place."""


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a value was written: `where` is "run.yaml:12" or "--set optim.lr".

    `raw` is the text of a plain (unquoted) scalar, None for everything else.
    """

    where: str
    line: int
    raw: str | None = None


class Fault(NamedTuple):
    """Something wrong with one key: a sentence, and the key path (empty where it has none)."""

    path: KeyPath
    spot: Spot
    message: str


@dataclass(slots=True)
class Tree:
    """A document: its value, the spot of each value by key path, and what is wrong already."""

    value: Any
    spots: dict[KeyPath, Spot] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)


def plain_scalar(text: str) -> str | int | float | bool | None:
    """The value of an unquoted scalar by the rules at the top of this module."""
    if text in _NULL:
        return None
    lowered = text.lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    if lowered in _INFINITE:
        return _INFINITE[lowered]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text) and not _DIGITS.fullmatch(text):
        return float(text)
    return text


_LARGEST = 256 << 10  # bytes of a file: thousands of lines


class _Loader(yaml.SafeLoader):
    """PyYAML up to the node graph; the tag of a scalar says only whether it was quoted."""

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        if kind is yaml.ScalarNode:
            return "plain" if implicit[0] else "quoted"
        return "collection"

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        mark = event.start_mark
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            problem = "anchors (&) and aliases (*) are not supported; quote the value if it is text"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
        if getattr(event, "tag", None) is not None:
            raise yaml.MarkedYAMLError(problem="tags (!) are not supported", problem_mark=mark)
        return super().compose_node(parent, index)


def read_yaml(path: str | Path) -> Tree:
    """Read a file; raise YamlProblem when it is missing, not UTF-8 or not YAML."""
    try:
        with open(path, "rb") as file:
            data = file.read(_LARGEST + 1)
    except FileNotFoundError:
        raise YamlProblem(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise YamlProblem(f"{path}: cannot be read: {reason}") from None
    if len(data) > _LARGEST:
        raise YamlProblem(f"{path}: is larger than {_LARGEST >> 10} KB: no configuration")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise YamlProblem(
            f"{path}:{line}: byte {error.start} is not UTF-8; save the file as UTF-8"
        ) from None
    return _parse(text, _Place(str(path)))


def _parse(text: str, where: _Place) -> Tree:
    """Turn text into a Tree (value None for an empty text), or raise YamlProblem."""
    tree = Tree(None)
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
        if node is None:
            tree.spots[()] = Spot(where(1), 1)
        else:
            tree.value = _convert(node, (), tree, where)
    except yaml.MarkedYAMLError as error:
        raise YamlProblem(_syntax_message(error, text, where)) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlProblem(
            f"{where(line)}: character U+{ord(text[error.position]):04X} is not allowed in YAML"
        ) from None
    except RecursionError:
        raise YamlProblem(f"{where(1)}: nested too deeply") from None
    return tree


def _syntax_message(error: yaml.MarkedYAMLError, text: str, where: _Place) -> str:
    mark = error.problem_mark or error.context_mark
    problem = " ".join(str(error.problem or error.context).split())
    if mark is None:
        return f"{where(1)}: not readable as YAML: {problem}"
    lines = text.split("\n")
    line = lines[mark.line] if mark.line < len(lines) else ""
    if line[: mark.column + 1].strip() == "" and "\t" in line[: mark.column + 1]:
        problem = "indented with a tab; use spaces"
    return f"{where(mark.line + 1, mark.column + 1)}: not readable as YAML: {problem}"


def _convert(node: yaml.Node, path: KeyPath, tree: Tree, where: _Place) -> Any:
    """The plain value of a node; notes the spot of the value and of everything inside it."""
    line = node.start_mark.line + 1
    if isinstance(node, yaml.ScalarNode):
        plain = node.tag == "plain"
        tree.spots.setdefault(path, Spot(where(line), line, node.value if plain else None))
        return plain_scalar(node.value) if plain else node.value
    tree.spots.setdefault(path, Spot(where(line), line))
    if isinstance(node, yaml.SequenceNode):
        return [_convert(item, (*path, i), tree, where) for i, item in enumerate(node.value)]
    assert isinstance(node, yaml.MappingNode)
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise yaml.MarkedYAMLError(
                problem="a key must be one word", problem_mark=key_node.start_mark
            )
        key = key_node.value
        inner = (*path, key)
        key_line = key_node.start_mark.line + 1
        if key in result:
            message = f"is given twice (first in line {tree.spots[inner].line})"
            tree.faults.append(Fault(inner, Spot(where(key_line), key_line), message))
            continue
        raw = value_node.value if value_node.tag == "plain" else None
        tree.spots[inner] = Spot(where(key_line), key_line, raw)  # the key's line, not the value's
        result[key] = _convert(value_node, inner, tree, where)
    return result


def dotted(path: KeyPath) -> str:
    """data.train[1].source; a name that would tear the line stands in quotes."""

    def written(part: str | int) -> str:
        if isinstance(part, int):
            return f"[{part}]"
        return f".{part}" if part.isprintable() else f".{part!r}"

    return "".join(map(written, path)).removeprefix(".")


_BELOW = 10**9
"""Line of a `--set`: below every line of the file, so that reports name the file's faults first."""


def override(tree: Tree, text: str) -> None:
    """Put one `section.key=value` into the tree; what is wrong with it becomes one of its faults.

    The value is YAML; an index addresses an item of a list (`data.train.0.weight=2`).
    """
    key, equals, value = (part.strip() for part in text.partition("="))
    spot = Spot(f"--set {key}", _BELOW)

    def refuse(message: str) -> None:
        tree.faults.append(Fault((), spot, message))

    if not equals or not key:
        return refuse("write --set section.key=value, for example --set train.max_steps=1000")
    try:
        inner = _parse(value, _Place(spot.where, lines=False))
    except YamlProblem as problem:
        return refuse(str(problem).removeprefix(f"{spot.where}: "))
    path: KeyPath = ()
    place: Any = tree.value
    *above, last = key.split(".")
    for part in above:
        if part == "0" and isinstance(place, dict) and path:
            continue  # what may be a list of several, and is one
        step = int(part) if isinstance(place, list) and part.isdecimal() else part
        if isinstance(place, dict) and place.get(step) is None:
            place[step] = {}  # a section that the file leaves out
        if not _holds(place, step):
            return refuse(f"{dotted(path) or 'the top'} has no item {part}")
        path, place = (*path, step), place[step]
    step = int(last) if isinstance(place, list) and last.isdecimal() else last
    if not isinstance(place, dict) and not _holds(place, step):
        return refuse(f"{dotted(path)} has no item {last}")
    path, place[step] = (*path, step), inner.value
    tree.spots = {old: s for old, s in tree.spots.items() if old[: len(path)] != path}
    for new, s in inner.spots.items():
        tree.spots[(*path, *new)] = Spot(spot.where, _BELOW, s.raw)
    for fault in inner.faults:
        tree.faults.append(Fault((*path, *fault.path), spot, fault.message))
    return None


def _holds(place: Any, step: str | int) -> bool:
    return step in (
        place if isinstance(place, dict) else range(len(place)) if isinstance(place, list) else ()
    )


def plain_tree(value: Any, name: str) -> Tree:
    """A Tree of values that come from no text; `name` stands for the place of each."""
    tree = Tree(value)

    def note(item: Any, path: KeyPath) -> None:
        tree.spots[path] = Spot(name, 0)
        pairs = enumerate(item) if isinstance(item, list) else ()
        for key, inner in item.items() if isinstance(item, dict) else pairs:
            note(inner, (*path, key))

    note(value, ())
    return tree


class _Dumper(yaml.SafeDumper):
    """Writes text so that `plain_scalar` gives it back, and short lists on one line."""

    def ignore_aliases(self, data: Hashable) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if plain_scalar(text) is text and text.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _represent_list(dumper: yaml.SafeDumper, items: list[Any]) -> yaml.SequenceNode:
    flow = not any(isinstance(item, dict | list) for item in items)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=flow)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(list, _represent_list)


def dump_yaml(value: Any) -> str:
    """YAML text of plain values (dict, list, str, int, float, bool, None); reads back equal."""
    text = yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False,
        width=10**6,
    )  # fmt: skip
    assert isinstance(text, str)
    return text
