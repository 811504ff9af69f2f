"""Rules for the whole source: nothing is unpickled, YAML is read safely, types are published."""

from __future__ import annotations

import ast
import re
import runpy
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
SOURCES = sorted((PROJECT / "mttrain").glob("*.py"))
PROJECT_FILE = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))

UNPICKLING_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "shelve",
    "marshal",
}
"""Loading with these can run code that the file brings (X06)."""

UNSAFE_CALLS = {
    "torch.load",
    "torch.save",
    "yaml.load",
    "yaml.load_all",
    "yaml.unsafe_load",
    "yaml.full_load",
    "eval",
    "exec",
    "os.system",
}


def calls(source: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_nothing_is_unpickled(source: Path) -> None:
    """X06: stops a checkpoint or a configuration from running code when it is loaded."""
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        assert not {name.split(".")[0] for name in names} & UNPICKLING_MODULES, source.name
    for line, name in calls(source):
        assert name not in UNSAFE_CALLS, f"{source.name}:{line} calls {name}"
    assert "allow_pickle" not in source.read_text(encoding="utf-8")


def test_types_are_published() -> None:
    """PEP 561; that the wheel holds every file of the package is tested with the wheel."""
    assert (PROJECT / "mttrain" / "py.typed").exists()


def test_requirements_have_lower_bounds_only() -> None:
    """Stops an upper pin from making the package uninstallable next year."""
    wanted = list(PROJECT_FILE["project"]["dependencies"])
    for extra in PROJECT_FILE["project"]["optional-dependencies"].values():
        wanted += extra
    for requirement in wanted:
        assert not re.search(r"==|<|~=|!=", requirement), requirement


def test_constraints_are_exact_and_cover_the_dependencies() -> None:
    """Stops a dependency from being left out of the set that the tests ran on."""
    lines = (PROJECT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", pin) for pin in pins)
    pinned = {pin.split("==")[0] for pin in pins}
    extras = PROJECT_FILE["project"]["optional-dependencies"]
    for requirement in [*PROJECT_FILE["project"]["dependencies"], *extras["dev"]]:
        name = re.split(r"[^A-Za-z0-9._-]", requirement)[0].lower().replace("_", "-")
        assert name in {*pinned, "mttrain"}, name  # itself: dev holds other extras


def test_version_is_in_the_changelog() -> None:
    """Stops a release whose changes nobody wrote down."""
    text = (PROJECT / "mttrain" / "__init__.py").read_text(encoding="utf-8")
    version = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    assert version is not None
    changelog = (PROJECT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"[{version[1]}]" in changelog or "[Unreleased]" in changelog


def test_cases_page_is_up_to_date() -> None:
    """Stops docs/cases.md from naming tests that are gone; `scripts/update_cases.py` renews it."""
    script = runpy.run_path(str(PROJECT / "scripts" / "update_cases.py"))
    text = (PROJECT / "docs" / "cases.md").read_text(encoding="utf-8")
    assert script["render"](text) == text, "run scripts/update_cases.py"
    rows = {case for case, _ in script["ROW"].findall(text)}
    assert set(script["tests_by_case"]()) <= rows, "a docstring names a case that has no row"
