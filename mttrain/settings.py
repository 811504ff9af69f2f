"""What the sections of a configuration are made of: field types, checks, and the wording of errors.

`Section` is the frozen pydantic base. `check` validates a tree of plain values against a root
section and words every problem as "file:line: section.key: message (did you mean 'x'?)". All
problems are found in one go: fields first, then the checks between fields, as far as the fields
they look at are sound. Nothing here knows the settings themselves; those are in `config`.
"""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from mttrain.errors import ConfigError
from mttrain.languages import suggested_code
from mttrain.yamlio import Fault, KeyPath, Spot, Tree, dotted, plain_scalar

_DURATION = re.compile("".join(rf"(?:([0-9]{{1,12}}){unit})?" for unit in "dhms"))
_DURATION_UNITS = (86400, 3600, 60, 1)
_DEVICE = re.compile(r"auto|cpu|mps|cuda(:[0-9]+)?")


def _refuse(message: str) -> PydanticCustomError:
    return PydanticCustomError("setting", "{message}", {"message": message})


def _whole(value: object) -> object:
    """4e3 is a float to YAML and a whole number to its writer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _storable(value: object) -> object:
    if isinstance(value, str):
        if not value.strip():
            raise _refuse("must not be empty")
        if "\0" in value or any("\ud800" <= c <= "\udfff" for c in value):
            raise _refuse("holds a character that no file name or UTF-8 text can hold")
    return value


def _duration(value: object) -> object:
    value = _whole(value)
    if value is None or (type(value) is int and 0 < value < 2**63):
        return value
    if isinstance(value, str) and value and _DURATION.fullmatch(value) and seconds(value) > 0:
        return value
    raise _refuse(f"wants a time such as 90m, 1h30m, 45s or whole seconds, got {_shown(value)}")


def seconds(text: str) -> float:
    """The seconds of a duration such as 1h30m (d, h, m, s in this order)."""
    match = _DURATION.fullmatch(text)
    assert match is not None
    pairs = zip(match.groups(), _DURATION_UNITS, strict=True)
    return float(sum(int(amount or 0) * unit for amount, unit in pairs))


def _clip(value: object) -> object:
    if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
        raise _refuse(f"must be greater than 0, got {value}; use null to switch clipping off")
    return value


def _device(value: object) -> object:
    if isinstance(value, str) and not _DEVICE.fullmatch(value):
        raise _refuse(f"must be auto, cpu, cuda, cuda:N or mps, got {_shown(value)}")
    return value


def _batch_tokens(value: object) -> object:
    value = _whole(value)
    if value is None or value == "auto" or (type(value) is int and 0 < value < 2**63):
        return value
    raise _refuse(f"wants a whole number of at least 1, auto or null, got {_shown(value)}")


def _as_list(value: object) -> object:
    if isinstance(value, str | int | float):
        raise _refuse(
            f"wants {{source: FILE, target: FILE}}, or a list of such, got {_shown(value)}"
        )
    return [value] if isinstance(value, dict | Section) else value


def _language(value: str) -> str:
    code = suggested_code(value)
    if code is not None:
        raise _refuse(f"{_shown(value)} is not a language code; write {code}")
    return value


def as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


Text = Annotated[
    str, BeforeValidator(_storable), WithJsonSchema({"type": "string", "pattern": r"\S"})
]
Whole = Annotated[int, BeforeValidator(_whole), Field(lt=2**63)]  # 1e300 is one, too
Positive = Annotated[Whole, Field(ge=1)]
NotNegative = Annotated[Whole, Field(ge=0)]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]
Betas = Annotated[tuple[Share, Share], BeforeValidator(as_tuple)]
# JSON Schema cannot see what these functions check, so it is told.
_FORMS: dict[str, list[dict[str, Any]]] = {
    "batch_tokens": [
        {"enum": ["auto"]},
        {"type": "integer", "minimum": 1, "exclusiveMaximum": 2**63},
        {"type": "null"},
    ],
    "clip": [{"type": "number", "exclusiveMinimum": 0}, {"type": "null"}],
    "device": [
        {"enum": ["auto", "cpu", "cuda", "mps"]},
        {"type": "string", "pattern": "^cuda:[0-9]+$"},
    ],
    "duration": [
        {
            "type": "string",
            "pattern": "^(?=.*[1-9])" + "".join(rf"([0-9]{{1,12}}{u})?" for u in "dhms") + "$",
        },
        {"type": "integer", "minimum": 1, "exclusiveMaximum": 2**63},
        {"type": "null"},
    ],
}
ClipNorm = Annotated[
    float | None, BeforeValidator(_clip), WithJsonSchema({"anyOf": _FORMS["clip"]})
]
Device = Annotated[str, BeforeValidator(_device), WithJsonSchema({"anyOf": _FORMS["device"]})]
Duration = Annotated[
    str | int | None, BeforeValidator(_duration), WithJsonSchema({"anyOf": _FORMS["duration"]})
]
BatchTokens = Annotated[
    int | Literal["auto"] | None,
    BeforeValidator(_batch_tokens),
    WithJsonSchema({"anyOf": _FORMS["batch_tokens"]}),
]
OneOrMany = BeforeValidator(_as_list)
Language = Annotated[Text, AfterValidator(_language)]


class Problem(NamedTuple):
    """A fault between settings: the keys it looks at (first the one to name) and a sentence.

    Keys are dotted and relative to the section that reports them.
    """

    keys: tuple[str, ...]
    message: str


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, no conversion between types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def problems(self) -> Iterator[Problem]:
        """What is wrong between values that are right one by one."""
        yield from ()

    @model_validator(mode="after")
    def _refuse_problems(self, info: ValidationInfo) -> Section:
        if info.context == "fields only":
            return self
        text = "; ".join(f"{problem.keys[0]}: {problem.message}" for problem in self.problems())
        if text:
            raise _refuse(text)
        return self

    def changed(self, *names: str) -> Iterator[str]:
        """Those of the named fields that differ from their defaults."""
        for name in names:
            if getattr(self, name) != type(self).model_fields[name].default:
                yield name


R = TypeVar("R", bound=Section)


def check(root: type[R], tree: Tree, other_names: Mapping[str, str]) -> R:
    """The tree's values as a `root`, or ConfigError with every problem on its own line.

    `other_names` maps names that other programs use to dotted keys, for the suggestions.
    """
    if not tree.faults:
        try:
            return root.model_validate(tree.value)
        except ValidationError:
            pass  # validated again below, in steps that find all problems
    faults = list(tree.faults)
    broken: list[KeyPath] = []
    try:
        root.model_validate(tree.value, context="fields only")
    except ValidationError as error:
        names = KeyNames(root, other_names)
        for detail in error.errors(include_url=False):
            broken.append(detail["loc"])
            faults.append(_field_fault(detail, tree, names))
    faults += _problems_between(root, tree, broken)
    faults.sort(key=lambda fault: fault.spot.line)
    raise ConfigError("\n".join(map(_line, faults)))


def _line(fault: Fault) -> str:
    key = dotted(fault.path)
    if not key or fault.spot.where == f"--set {key}":
        return f"{fault.spot.where}: {fault.message}"
    return f"{fault.spot.where}: {key}: {fault.message}"


def _problems_between(root: type[Section], tree: Tree, broken: list[KeyPath]) -> list[Fault]:
    """The checks between fields, in every section and across them, on the fields that are sound."""
    result: list[Fault] = []
    sound: dict[str, Any] = {}

    def collect(section: Section, prefix: KeyPath) -> None:
        for problem in section.problems():
            paths = [(*prefix, *_key_path(key)) for key in problem.keys]
            if not any(path[: len(bad)] == bad[: len(path)] for bad in broken for path in paths):
                result.append(Fault(paths[0], _spot(tree, *paths), problem.message))

    for name, field in root.model_fields.items():
        value = tree.value.get(name)
        section = next(_sections_in(field.annotation), None)
        if section is None:
            if (name,) not in broken and name in tree.value:
                sound[name] = value
            continue
        bad = {path[1] for path in broken if path[0] == name and len(path) > 1}
        items = value.items() if isinstance(value, dict) else ()
        try:
            kept = {key: item for key, item in items if key not in bad}
            sound[name] = section.model_validate(kept, context="fields only")
        except ValidationError:
            continue  # a required field is missing, and reported already
        collect(sound[name], (name,))
    collect(root.model_construct(**sound), ())
    return result


def _key_path(key: str) -> KeyPath:
    """data.train.0.source -> its parts, the 0 as a number"""
    return tuple(int(part) if part.isdecimal() else part for part in key.split("."))


def _spot(tree: Tree, *paths: KeyPath) -> Spot:
    """The spot of the first of the keys that was written, or of the nearest section above."""
    for path in paths:
        if path in tree.spots:
            return tree.spots[path]
    path = paths[0]
    while path and path not in tree.spots:
        path = path[:-1]
    return tree.spots[path]


def _field_fault(detail: ErrorDetails, tree: Tree, names: KeyNames) -> Fault:
    path: KeyPath = ()
    for part in detail["loc"]:
        # `train: {...}` was made a list of one, so its 0 is not in the file.
        if not isinstance(part, int) or (*path, part) in tree.spots:
            path = (*path, part)
    spot = _spot(tree, path)
    raw = spot.raw if path in tree.spots else None
    return Fault(path, spot, _explain(detail, path, raw, names))


_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "model_type": "a section of key: value lines",
    "list_type": "a list",
    "tuple_type": "a list",
}
_BOUNDS = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


def _explain(detail: ErrorDetails, path: KeyPath, raw: str | None, names: KeyNames) -> str:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        return "unknown key" + names.suggestion(path)
    if kind == "missing":
        return "has too few values" if isinstance(detail["loc"][-1], int) else "is required"
    if kind == "string_type":
        return _text_wanted(value, raw)
    if kind in _WANTED:
        return f"wants {_WANTED[kind]}, got {_shown(value, raw)}" + _number_hint(kind, value, raw)
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return f"must be {words} {context[name]:g}, got {_shown(value, raw)}"
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", context["expected"])
        near = difflib.get_close_matches(str(value), choices, 1)
        return (
            f"must be {', '.join(choices[:-1])} or {choices[-1]}, got {_shown(value, raw)}"
            + (f" (did you mean '{near[0]}'?)" if near else "")
        )  # fmt: skip
    if kind == "finite_number":
        return f"must be a finite number, got {_shown(value, raw)}"
    return str(detail["msg"])


def _shown(value: object, raw: str | None = None) -> str:
    """A value in a message: as it was written where that is known, and never long."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list | tuple):
        return "a list"
    text = raw if raw is not None else f'"{value}"' if isinstance(value, str) else repr(value)
    if isinstance(value, bool) and raw is None:
        text = str(value).lower()
    text = text.encode("unicode_escape").decode("ascii") if not text.isprintable() else text
    return text if len(text) <= 60 else text[:57] + "..."


def _text_wanted(value: object, raw: str | None) -> str:
    if not raw or isinstance(value, dict | list):
        return f"wants text, got {_shown(value)}"
    kind = "a boolean" if isinstance(value, bool) else "nothing" if value is None else "a number"
    return f'wants text, but YAML reads {raw} as {kind}; quote it: "{raw}"'


def _number_hint(kind: str, value: object, raw: str | None) -> str:
    if not isinstance(value, str) or kind not in ("int_type", "float_type", "bool_type"):
        return ""
    if raw is None and not isinstance(plain_scalar(value), str | None):
        return "; remove the quotes"
    plain = re.sub(r"_", "", value)
    if plain != value and plain_scalar(plain) != plain:
        return f"; write {plain}"
    if re.fullmatch(r"[-+]?0[0-9]+", value):
        return f"; write {int(value)} (a leading zero means octal to some programs)"
    if re.fullmatch(r"[0-9]+,[0-9]+", value):
        return f"; write {value.replace(',', '.')}"
    return ""


def _sections_in(annotation: object) -> Iterator[type[Section]]:
    """The section classes inside a field's type: itself, optional, or in a list."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for part in typing.get_args(annotation):
        yield from _sections_in(part)


class KeyNames:
    """All dotted keys of a root section, and the suggestion for a key that is none of them."""

    def __init__(self, root: type[Section], aliases: Mapping[str, str]) -> None:
        self.known = list(self._collect(root, ""))
        self.aliases = aliases

    def _collect(self, section: type[Section], prefix: str) -> Iterator[str]:
        for name, field in section.model_fields.items():
            yield prefix + name
            for inner in _sections_in(field.annotation):
                yield from self._collect(inner, f"{prefix}{name}.")

    def suggestion(self, path: KeyPath) -> str:
        """ " (did you mean 'x'?)", or the keys that there are."""
        *above, last = (part for part in path if isinstance(part, str))
        parent = "".join(f"{part}." for part in above)
        word = last.lower().replace("-", "_")
        here = [
            key.removeprefix(parent)
            for key in self.known
            if key.startswith(parent) and "." not in key.removeprefix(parent)
        ]
        if word in self.known and "." in word:
            section, _, name = word.rpartition(".")
            return f"; write {name} inside the section {section}"
        names = {**self.aliases, **{key.rpartition(".")[2]: key for key in self.known}}
        if word in here:
            near = [parent + word]
        elif word in self.aliases:
            near = [self.aliases[word]]
        else:
            near = (
                [key for key in self.known if key.rpartition(".")[2] == word]
                or [parent + key for key in difflib.get_close_matches(word, here, 1, 0.7)]
                or [names[name] for name in difflib.get_close_matches(word, names, 1, 0.7)]
            )
        if near:
            words = " or ".join(f"'{key.removeprefix(parent)}'" for key in near)
            return f" (did you mean {words}?)"
        return f"; the keys here are {', '.join(here)}"
