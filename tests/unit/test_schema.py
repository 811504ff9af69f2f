"""The JSON schema of configurations, judged by a validator and against `load_config`."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mttrain.config import load_config, parse_config
from mttrain.errors import ConfigError
from mttrain.schema import is_schema, json_schema, schema_text
from mttrain.settings import KeyNames
from mttrain.yamlio import read_yaml

PROJECT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((PROJECT / "configs").glob("*.yaml"))
SCHEMA = json_schema()
VALIDATORS = [jsonschema.Draft7Validator(SCHEMA), jsonschema.Draft202012Validator(SCHEMA)]

MINIMAL: dict[str, Any] = {
    "run_dir": "runs/x",
    "data": {
        "source_lang": "en",
        "target_lang": "de",
        "train": {"source": "a.en", "target": "a.de"},
        "valid": {"source": "v.en", "target": "v.de"},
    },
    "train": {"max_steps": 10},
}


def valid(content: Any) -> bool:
    """What the schema says; both dialects must say the same."""
    answers = {validator.is_valid(content) for validator in VALIDATORS}
    assert len(answers) == 1
    return answers.pop()


def loads(content: Any) -> bool:
    try:
        parse_config(copy.deepcopy(content))
    except ConfigError:
        return False
    return True


def changed(path: str, value: Any) -> dict[str, Any]:
    """MINIMAL with one value put in its place; `...` removes it."""
    content = copy.deepcopy(MINIMAL)
    *above, last = path.split(".")
    place: Any = content
    for name in above:
        place = place.setdefault(name, {})
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return content


def nodes(node: Any, name: str = "") -> Any:
    """Every dictionary in the schema, with the key that it stands under."""
    if isinstance(node, dict):
        yield name, node
        for key, value in node.items():
            yield from nodes(value, key)
    elif isinstance(node, list):
        for value in node:
            yield from nodes(value, name)


# ---- the schema itself ------------------------------------------------------------------------


def test_it_is_a_schema() -> None:
    """Stops a schema that validators refuse or that holds words of the library that made it."""
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    for name, node in nodes(SCHEMA):
        assert not {"ge", "gt", "le", "lt", "$defs", "prefixItems"} & set(node), name
    assert "Config\\b" not in schema_text() and "pydantic" not in schema_text()
    titles = [node["title"] for _, node in nodes(SCHEMA) if isinstance(node.get("title"), str)]
    assert titles == [SCHEMA["title"]]


def test_every_key_has_a_description_and_a_default() -> None:
    """Editors show both; a section refuses keys that it does not have."""
    sections = [node for _, node in nodes(SCHEMA) if "additionalProperties" in node]
    assert len(sections) == 8
    described = 0
    for section in sections:
        assert section["additionalProperties"] is False
        for name, field in section["properties"].items():
            described += 1
            assert field["description"], name
            is_section = "properties" in field
            assert is_section or (name in section.get("required", ())) != ("default" in field), name
    assert described > 60


def test_the_shipped_file_is_up_to_date() -> None:
    """Stops editors from refusing a new key: `mttrain config --schema > configs/schema.json`."""
    path = PROJECT / "configs" / "schema.json"
    assert path.read_text(encoding="utf-8") == schema_text()
    assert is_schema(path) and not is_schema(PROJECT / "pyproject.toml")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configurations_are_valid_and_name_the_schema(path: Path) -> None:
    """Stops a recipe that an editor marks as wrong."""
    content = read_yaml(path).value
    for validator in VALIDATORS:
        validator.validate(content)
    first = path.read_text(encoding="utf-8").split("\n")[0]
    found = re.fullmatch(r"# yaml-language-server: \$schema=(\S+)", first)
    assert found and (path.parent / found[1]).exists()
    # And with every default written out, as `mttrain config` prints it.
    resolved = load_config(path).model_dump(mode="json")
    assert valid(resolved)


# ---- schema and load_config -------------------------------------------------------------------

RIGHT: list[tuple[str, Any]] = [
    ("seed", 0),
    ("seed", 7.0),
    ("optim.warmup_steps", 4e3),
    ("optim.lr", 1),
    ("optim", None),
    ("model", {}),
    ("decode", None),
    ("data.train", [{"source": "a", "target": "b", "weight": 0.5}, {"pairs": "c.tsv"}]),
    ("data.train", {"pairs": "c.tsv", "fields": ["en", "de"]}),
    ("data.train", {"pairs": "c.tsv", "fields": [1, 3]}),
    ("data.train", {"pairs": None, "source": "a", "target": "b", "fields": None}),
    ("data.valid.weight", 1.0),
    ("data.test", None),
    ("data.test", {"pairs": "sacrebleu:wmt14"}),
    ("train.max_time", "1h30m"),
    ("train.max_time", 90),
    ("train.max_time", None),
    ("train", {"max_time": "45s"}),
    ("train", {"max_epochs": 3, "max_steps": None}),
    ("train.device", "cuda:3"),
    ("optim.clip_norm", None),
    ("optim.betas", [0.5, 0]),
    ("threads", None),
]

WRONG: list[tuple[str, Any]] = [
    ("run_dir", ...),
    ("run_dir", "  "),
    ("run_dir", 5),
    ("seed", -1),
    ("seed", 1.5),
    ("seed", "1"),
    ("seed", True),
    ("seed", 2**63),
    ("threads", 0),
    ("threads", 1025),
    ("sed", 1),
    ("data", None),
    ("data", ...),
    ("data.source_lang", False),
    ("data.source_lang", ...),
    ("data.train", "a.en"),
    ("data.train", []),
    ("data.train", [{"source": "a"}]),
    ("data.train", {"source": "a", "target": "b", "pairs": "c.tsv"}),
    ("data.train", {"source": "a", "target": "b", "wieght": 2}),
    ("data.train", {"source": "a", "target": "b", "weight": 0}),
    ("data.train", {"pairs": "c.tsv", "fields": ["en"]}),
    ("data.train", {"pairs": "c.tsv", "fields": [1, 2, 3]}),
    ("data.valid", [{"source": "a", "target": "b"}]),
    ("data.valid", {"source": "a", "target": None}),
    ("data.valid.weight", 2),
    ("data.test", {"source": "a", "target": "b", "weight": 0.5}),
    ("data.max_length", 1),
    ("tokenizer.vocab_size", 100),
    ("tokenizer.shared", 1),
    ("tokenizer.level", "word"),
    ("tokenizer.path", ""),
    ("model", []),
    ("model.d_model", 65_537),
    ("model.dropout", 1),
    ("model.norm", "prre"),
    ("model.tie", None),
    ("optim.lr", 0),
    ("optim.lr", "1e-3"),
    ("optim.betas", [0.9]),
    ("optim.betas", [0.9, 1.0]),
    ("optim.betas", 0.9),
    ("optim.clip_norm", 0),
    ("train", None),
    ("train", {}),
    ("train", {"max_steps": None}),
    ("train.max_steps", 0),
    ("train.max_time", "1:30"),
    ("train.max_time", ""),
    ("train.max_time", "0s"),
    ("train.max_time", "5m1h"),
    ("train.max_time", 0),
    ("train.max_time", 1.5),
    ("train.device", "gpu"),
    ("train.device", "cuda:"),
    ("train.best_metric", "ter"),
    ("train.tensorboard", "yes"),
    ("decode.beam", 0),
    ("decode.length_penalty", 9.5),
    ("decode.beams", 4),
]


def named(cases: list[tuple[str, Any]]) -> list[str]:
    return [f"{path}={'absent' if value is ... else value}" for path, value in cases]


@pytest.mark.parametrize(("path", "value"), RIGHT, ids=named(RIGHT))
def test_what_both_accept(path: str, value: Any) -> None:
    """Stops an editor from marking what `train` takes."""
    content = changed(path, value)
    parse_config(copy.deepcopy(content))
    for validator in VALIDATORS:
        validator.validate(content)


@pytest.mark.parametrize(("path", "value"), WRONG, ids=named(WRONG))
def test_what_both_refuse(path: str, value: Any) -> None:
    """Stops an editor from passing what `train` then refuses."""
    content = changed(path, value)
    assert not loads(content)
    assert not valid(content)


FULL: dict[str, Any] = parse_config(
    {**copy.deepcopy(MINIMAL), "data": {**MINIMAL["data"], "test": MINIMAL["data"]["valid"]}}
).model_dump(mode="json")


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Any:
    yield path
    items: Any = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        items = enumerate(value)
    for key, inner in items:
        yield from leaves(inner, (*path, key))


PATHS = [path for path in leaves(FULL) if path]
NUMBERS = st.one_of(
    st.integers(-3, 10_000),
    st.sampled_from([2**63 - 1, 2**63, 65_536, 65_537, 1024, 1025, 259, 260]),
    st.floats(-3, 3, allow_nan=False),
    st.sampled_from([0.0, 1.0, 4e3, 1e300, 1e-9, -9.0, 9.0]),
)
WORDS = st.one_of(
    st.sampled_from(
        [
            *("post", "pre", "prre", "all", "target", "none", "bleu", "nll", "auto", "cpu", "cuda"),
            *(
                "cuda:1",
                "mps",
                "90m",
                "1h30m",
                "1d",
                "0s",
                "5",
                "relu",
                "gelu",
                "linear",
                "constant",
            ),
            *("subword", "character", "last", "best", "fp32", "yes"),
        ]
    ),
    st.text("ab \n1:", max_size=4),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, WORDS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["source", "target", "pairs", "beam", "x"]), inner),
    ),
    max_leaves=4,
)


def mutated(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    content = copy.deepcopy(FULL)
    place: Any = content
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    return content


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(PATHS), VALUES)
def test_what_loads_is_valid(path: tuple[Any, ...], value: Any) -> None:
    """The schema never refuses what `load_config` takes."""
    content = mutated(path, value)
    if loads(content):
        for validator in VALIDATORS:
            validator.validate(content)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(PATHS), VALUES)
def test_what_is_valid_loads(path: tuple[Any, ...], value: Any) -> None:
    """What only `load_config` refuses are settings that make no sense together, and names that
    the schema does not know: never the kind of a value or its bounds."""
    content = mutated(path, value)
    if not valid(content) or loads(content):
        return
    with pytest.raises(ConfigError) as caught:
        parse_config(content)
    for line in str(caught.value).split("\n"):
        assert re.search(
            "has no effect|is above|give either|give at least|needs|is not divisible|is required "
            "with|leaves no step|is given alone|is none of|for both sides|is not a language code|"
            "wants two names|wants a number|have a weight|holds both sides|an effect only|1 to |"
            "counted from 1|only with|no training corpus has|makes no tag|"
            "is required: all training corpora",
            line,
        ), line


def test_names_are_those_of_load_config() -> None:
    """Stops a key that one of the two does not know."""
    from mttrain.config import RunConfig

    known = set(KeyNames(RunConfig, {}).known)
    corpus = SCHEMA["definitions"]["corpus"]["properties"]
    found = {f"data.{split}.{key}" for split in ("train", "valid", "test") for key in corpus}
    for name, node in SCHEMA["properties"].items():
        found |= {name, *(f"{name}.{key}" for key in node.get("properties", ()))}
    assert found == known


def test_it_is_json() -> None:
    assert json.loads(schema_text()) == SCHEMA
