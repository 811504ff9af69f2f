"""The README and the pages of docs/ are test inputs: commands, options, files and names exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import typer.main

import mttrain
from mttrain.aliases import OTHER_NAMES
from mttrain.cli import app
from mttrain.config import RunConfig, load_config
from mttrain.settings import KeyNames
from tests.project.docs_sandbox import PAGES, PROJECT, blocks, fences, shell_commands

PATH = re.compile(r"(?<![\w/.-])((?:scripts|configs|docs|tests|data/demo|\.ci)/[\w./-]*\w)")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)


def commands() -> dict[str, Any]:
    """Name -> command, as the program itself holds them."""
    return dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def options(command: Any) -> dict[str, str | None]:
    """Every spelling of every option of a command, with its help."""
    found = {}
    for parameter in command.params:
        if parameter.param_type_name == "option":
            found |= dict.fromkeys([*parameter.opts, *parameter.secondary_opts], parameter.help)
    return found


@each_page
def test_commands_and_options_exist(page: Path) -> None:
    """Stops a renamed option from living on in the documentation."""
    known = commands()
    for words in shell_commands(page):
        if words and words[0] in ("--help", "--version"):
            continue
        assert words and words[0] in known, f"{page.name}: mttrain {' '.join(words)}"
        allowed = {*options(known[words[0]]), "--help"}
        for word in words[1:]:
            if word.startswith("--"):
                assert word.split("=")[0] in allowed, f"{page.name}: mttrain {words[0]} {word}"


@each_page
def test_files_exist(page: Path) -> None:
    """Stops links and paths to files that were moved."""
    text = page.read_text(encoding="utf-8")
    for name in PATH.findall(text):
        assert (PROJECT / name).exists(), f"{page.name} names {name}"
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@each_page
def test_python_examples_compile_and_import(page: Path) -> None:
    """Stops examples with names that the package does not have."""
    for body in fences(page, "python"):
        for node in ast.walk(ast.parse(body)):
            if isinstance(node, ast.ImportFrom) and node.module == "mttrain":
                for alias in node.names:
                    assert hasattr(mttrain, alias.name), f"{page.name}: {alias.name}"


@each_page
def test_yaml_examples_load(page: Path, tmp_path: Path) -> None:
    """Stops the example that everyone copies from being refused."""
    for block in blocks(page):
        if block.language == "yaml" and block.body.lstrip().startswith("run_dir:"):
            path = tmp_path / "example.yaml"
            path.write_text(block.body, encoding="utf-8")
            load_config(path)


def test_every_command_is_in_the_readme() -> None:
    text = (PROJECT / "README.md").read_text(encoding="utf-8")
    for name in commands():
        assert f"mttrain {name}" in text, name


def test_every_option_is_documented_and_has_help() -> None:
    """Stops options that only their author knows."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    for name, command in commands().items():
        assert command.help, name
        for option, explanation in options(command).items():
            assert explanation, f"{name} {option} has no help"
            assert f"`{option}" in text, f"{name} {option} is in no page"


def test_public_names_import() -> None:
    for name in mttrain.__all__:
        assert getattr(mttrain, name) is not None


def test_public_names_are_typed() -> None:
    """`from mttrain import Translator` was Any to a type checker: it reads no table, only the
    imports below TYPE_CHECKING; with "as", or the name would count as private."""
    source = (PROJECT / "mttrain" / "__init__.py").read_text(encoding="utf-8")
    (block,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    seen = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            assert alias.asname == alias.name
            seen[alias.name] = (node.module or "").removeprefix("mttrain.")
    assert seen == mttrain._PUBLIC


def test_decoding_options_of_eval() -> None:
    """The page said that `eval` takes all options of `translate`; it names those that it lacks."""
    text = (PROJECT / "docs" / "decoding.md").read_text(encoding="utf-8")
    section = text.split("## Evaluation")[1]
    first = section.split("| option")[0]
    known = {name: set(options(command)) for name, command in commands().items()}
    for name in known["translate"] - known["eval"]:
        assert f"`{name}`" in first, name
    named = set(re.findall(r"`(--[a-z-]+)`", first))
    assert known["translate"] - known["eval"] <= named <= known["translate"] | known["eval"]


def test_getting_started_says_where_the_command_is() -> None:
    """The page called a bare `mttrain`, which is in .venv and on nobody's path."""
    text = (PROJECT / "docs" / "getting-started.md").read_text(encoding="utf-8")
    assert "source .venv/bin/activate" in text.split("mttrain train")[0]


# ---- coming-from.md -----------------------------------------------------------------------------

COMING_FROM = PROJECT / "docs" / "coming-from.md"
SECTIONS = [name for name, field in RunConfig.model_fields.items()]
KEY = re.compile(rf"`((?:{'|'.join(SECTIONS)})(?:\.[a-z_]+)+)`")


def rows_of_other_names() -> list[tuple[str, list[str], list[str]]]:
    """The rows of the tables: its text, the names of the other program, our keys."""
    found = []
    for line in COMING_FROM.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)][1:-1]
        if len(cells) == 3 and not cells[0].startswith(("-", "`data.")):
            theirs = re.findall(r"`(?:--)?([\w-]+)`", cells[0])
            found.append((line, theirs, re.findall(r"`([a-z_.]+)`", cells[1])))
    return found


@each_page
def test_keys_exist(page: Path) -> None:
    """Stops a key that was renamed, or never was, from being recommended."""
    known = set(KeyNames(RunConfig, {}).known)
    for key in KEY.findall(page.read_text(encoding="utf-8")):
        # Other programs have sections called data and train, too.
        theirs = page == COMING_FROM and key.startswith(("data.src", "data.trg", "data.dev"))
        if not theirs and not key.endswith((".json", ".yaml")):
            assert key in known, f"{page.name}: {key}"


def test_other_names_are_answered_with_ours() -> None:
    """Stops a setting of another program from being refused without saying what it is here."""
    names = KeyNames(RunConfig, OTHER_NAMES)
    own = {key.rpartition(".")[2] for key in names.known}
    count = 0
    for line, theirs, keys in rows_of_other_names():
        for name in theirs if keys else ():
            word = name.replace("-", "_")
            if word not in own:  # the same word may mean something else here
                answer = names.suggestion((name,))
                assert any(f"{key}" in answer for key in keys), f"{name}: {answer}: {line}"
                count += 1
    assert count > 100


# ---- python-api.md ------------------------------------------------------------------------------


def test_every_public_name_is_described() -> None:
    """Stops a name from being public and nowhere explained."""
    text = (PROJECT / "docs" / "python-api.md").read_text(encoding="utf-8")
    for name in mttrain.__all__:
        assert re.search(rf"`{name}\b", text), name
    code = "\n".join(fences(PROJECT / "docs" / "python-api.md", "python"))
    for name in set(mttrain.__all__) - {"__version__", "Translation"}:
        assert re.search(rf"\b{name}\b", code), f"{name} is in no example"
