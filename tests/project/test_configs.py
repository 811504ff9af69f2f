"""Shipped configurations are test inputs; docs/configuration.md is held to the real settings."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mttrain.config import CorpusConfig, RunConfig, load_config
from mttrain.model import Transformer
from mttrain.yamlio import plain_scalar

PROJECT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((PROJECT / "configs").glob("*.yaml"))
ROW = re.compile(r"^\| `([a-z0-9_.]+)` \| (.+?) \| (.+) \|$", re.MULTILINE)

each_config = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)


@each_config
def test_config_loads(path: Path) -> None:
    """Stops a renamed key from breaking a recipe that nobody runs every week."""
    config = load_config(path)
    assert config.run_dir == f"runs/{path.stem}"
    for corpus in [*config.data.train, config.data.valid, config.data.test]:
        if corpus is not None:
            assert corpus.source.endswith(f".{config.data.source_lang}")
            assert corpus.target.endswith(f".{config.data.target_lang}")


@each_config
def test_model_of_config_has_the_right_shapes(path: Path) -> None:
    """Stops a recipe whose model cannot be built; tensors are shapes only."""
    config = load_config(path)
    target_vocab = config.tokenizer.vocab_size
    source_vocab = target_vocab if config.tokenizer.shared else target_vocab + 7
    with torch.device("meta"):
        model = Transformer(config.model, source_vocab, target_vocab).eval()
        hidden = model(torch.ones(2, 11, dtype=torch.int64), torch.ones(2, 7, dtype=torch.int64))
        logits = model.project(hidden)
    assert hidden.shape == (2, 7, config.model.d_model)
    assert logits.shape == (2, 7, target_vocab)


@pytest.mark.parametrize("size", ["base", "big"])
def test_wmt14_rate_is_the_papers(size: str) -> None:
    """Stops a slip in copying section 5.3: the peak is d_model^-0.5 * warmup_steps^-0.5."""
    config = load_config(PROJECT / "configs" / f"wmt14_en_de_{size}.yaml")
    peak = config.model.d_model**-0.5 * config.optim.warmup_steps**-0.5
    assert config.optim.lr == pytest.approx(peak, rel=1e-3)


def test_demo_corpus_is_there() -> None:
    config = load_config(PROJECT / "configs" / "demo.yaml")
    corpora = [*config.data.train, config.data.valid, config.data.test]
    for corpus in corpora:
        assert corpus is not None
        assert (PROJECT / corpus.source).exists() and (PROJECT / corpus.target).exists()


def settings(
    model: type[BaseModel] = RunConfig, prefix: str = ""
) -> Iterator[tuple[str, FieldInfo]]:
    """Every dotted key with its field."""
    for name, field in model.model_fields.items():
        kind: Any = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel) and kind is not CorpusConfig:
            yield from settings(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


FIELDS = {**dict(settings()), **CorpusConfig.model_fields}
"""The keys of a corpus (source, target, weight) are the same three wherever one stands."""


def test_every_key_is_documented_with_its_default() -> None:
    """Stops settings and their page from drifting apart, in either direction."""
    text = (PROJECT / "docs" / "configuration.md").read_text(encoding="utf-8")
    rows = ROW.findall(text)
    documented = {key: default.strip("`") for key, default, _ in rows}
    assert len(rows) == len(documented), "a key is documented twice"
    assert set(documented) == set(FIELDS)
    for key, field in FIELDS.items():
        if field.is_required():
            assert documented[key] == "required", key
        else:
            default = field.get_default(call_default_factory=True)
            shown = list(default) if isinstance(default, tuple) else default
            assert plain(documented[key]) == shown, key


def plain(text: str) -> object:
    """The value of a default as a configuration file would give it."""
    return yaml.safe_load(text) if text.startswith("[") else plain_scalar(text)


def test_every_setting_is_read_somewhere() -> None:
    """Stops a key that is accepted, documented and then forgotten."""
    read: set[str] = set()
    for path in (PROJECT / "mttrain").glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if path.stem not in ("config", "settings"):
            read |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    read |= {"max_time"} if "max_seconds" in read else set()
    assert {key.split(".")[-1] for key in FIELDS} <= read


def test_every_setting_has_a_description() -> None:
    """Stops a field without its line of meaning and unit (it is also the help text)."""
    for key, field in FIELDS.items():
        assert field.description, key
