"""The package as pip sees it: what it asks for, what the wheel holds, the Dockerfile.

`scripts/check_wheel` installs the wheel with the newest and the lowest versions and uses it; here
is what can be said without a network.
"""

from __future__ import annotations

import ast
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

PROJECT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))
TABLE = PYPROJECT["project"]
EXTRAS: dict[str, list[str]] = TABLE["optional-dependencies"]
PARTS = runpy.run_path(str(PROJECT / "scripts" / "wheel_parts.py"))
plain_name = PARTS["plain_name"]

# The module that a distribution is imported as, where the names differ.
MODULES = {"pyyaml": "yaml", "unbabel-comet": "comet"}
# Modules that come with another distribution, which asks for theirs by name.
COMES_WITH = {"pydantic_core": "pydantic", "markupsafe": "jinja2"}
# Extras that add no import of their own: tools, and dictionaries that sacrebleu loads.
TOOLS = {"dev", "zh_ja_ko"}


def requirements(*extras: str) -> list[Requirement]:
    """What the package asks for, and what these extras add."""
    lines = list(TABLE["dependencies"])
    for extra in extras:
        lines += EXTRAS[extra]
    return [Requirement(line) for line in lines]


def modules(*extras: str) -> dict[str, str]:
    """Module -> distribution, of what these extras and the package ask for."""
    names = [plain_name(r.name) for r in requirements(*extras)]
    return {MODULES.get(name, name): name for name in names if name != "mttrain"}


def imports() -> dict[str, set[str]]:
    """Module that is neither ours nor Python's -> files of the package that import it."""
    found: dict[str, set[str]] = {}
    for path in (PROJECT / "mttrain").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path.name}: relative import"
                names = [node.module or ""]
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "import_module",
                "importlib.import_module",
                "find_spec",
                "importlib.util.find_spec",
            ):
                names = [a.value for a in node.args if isinstance(a, ast.Constant)]
            for name in names:
                top = name.split(".")[0]
                if top != "mttrain" and top not in sys.stdlib_module_names:
                    found.setdefault(top, set()).add(path.name)
    return found


# ---- what is asked for ------------------------------------------------------------------------


def test_every_import_is_declared() -> None:
    """Stops a package that happens to be installed here from being missing at the user's."""
    declared = modules(*(extra for extra in EXTRAS if extra not in TOOLS))
    for name, files in imports().items():
        assert COMES_WITH.get(name, name) in declared, f"{name}, imported in {sorted(files)}"


@pytest.mark.parametrize(("module", "parent"), COMES_WITH.items())
def test_undeclared_modules_really_come_with_another(module: str, parent: str) -> None:
    """Stops the list of exceptions above from becoming an excuse: the parent asks for them."""
    asked = {plain_name(Requirement(x).name) for x in metadata.requires(parent) or []}
    assert plain_name(module) in asked


def test_every_dependency_is_imported() -> None:
    """Stops a dependency that nothing uses any more from being installed for ever."""
    imported = {COMES_WITH.get(name, name) for name in imports()} | set(imports())
    for extra in ["", *(extra for extra in EXTRAS if extra not in TOOLS)]:
        for module in modules(*filter(None, [extra])):
            assert module in imported, module


def test_core_needs_no_extra() -> None:
    """Stops a module of an extra from being imported when the package or a command is loaded:
    outside a function, only what every installation has may be imported."""
    core = {*modules(), "pydantic_core", "mttrain"}
    for path in (PROJECT / "mttrain").glob("*.py"):
        for node in top_level(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                top = name.split(".")[0]
                assert top in core or top in sys.stdlib_module_names, f"{path.name} imports {name}"


def top_level(tree: ast.Module) -> list[ast.stmt]:
    """The statements that run on import, those below TYPE_CHECKING left out."""
    found: list[ast.stmt] = []
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop()
        found.append(node)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.If | ast.Try | ast.With | ast.ClassDef):
            waiting += [x for x in ast.iter_child_nodes(node) if isinstance(x, ast.stmt)]
            for handler in getattr(node, "handlers", []):
                waiting += handler.body
    return found


@pytest.mark.parametrize("extra", ["", *EXTRAS])
def test_bounds_are_lower_bounds(extra: str) -> None:
    """Stops upper pins, and dependencies without a bound, whose oldest releases nobody tried."""
    added = EXTRAS[extra] if extra else TABLE["dependencies"]
    for requirement in map(Requirement, added):
        operators = [part.operator for part in requirement.specifier]
        if requirement.name == "mttrain" or extra == "zh_ja_ko":
            assert operators == []  # the same distributions as above, with more of their extras
            known = EXTRAS if requirement.name == "mttrain" else {"ja": [], "ko": []}
            assert requirement.extras <= set(known)
        elif not requirement.name.startswith("types-"):  # dated releases of stubs
            assert operators == [">="], str(requirement)


def test_constraints_satisfy_the_bounds() -> None:
    """Stops a raised bound that the tested set does not fulfil: the quick start would end there."""
    lines = (PROJECT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {
        plain_name(pin.name): next(iter(pin.specifier)).version
        for pin in map(Requirement, (x for x in lines if x and not x.startswith("#")))
    }
    assert len(pins) == sum("==" in line for line in lines), "a package is named twice"
    for requirement in requirements(*(extra for extra in EXTRAS if extra != "comet")):
        name = plain_name(requirement.name)
        if name != "mttrain":
            assert name in pins, name
            assert requirement.specifier.contains(pins[name]), f"{requirement}: {pins[name]}"


def test_constraints_are_what_is_installed() -> None:
    """Stops constraints.txt from naming versions that the tests did not run on."""
    lines = (PROJECT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    for pin in map(Requirement, (x for x in lines if x and not x.startswith("#"))):
        try:
            installed = Version(metadata.version(pin.name)).public
        except metadata.PackageNotFoundError:
            continue  # for another platform, or for an extra that is not installed
        if not constrained():
            pytest.skip("not the environment of constraints.txt")
        assert pin.specifier.contains(installed), f"{pin}: {installed} is installed"


def constrained() -> bool:
    """Whether this environment was made with constraints.txt: by the scripts, in .venv."""
    return Path(sys.prefix) == PROJECT / ".venv"


def test_version_is_in_one_place() -> None:
    """Stops two versions from drifting apart."""
    assert "version" not in TABLE and TABLE["dynamic"] == ["version"]
    assert PYPROJECT["tool"]["hatch"]["version"] == {"path": "mttrain/__init__.py"}
    text = (PROJECT / "mttrain" / "__init__.py").read_text(encoding="utf-8")
    assert len(re.findall(r"^__version__ = \"\d+\.\d+\.\d+\"$", text, re.M)) == 1


def test_oldest_python_is_the_same_everywhere() -> None:
    """Stops tools from checking another Python than the one that is promised."""
    oldest = TABLE["requires-python"].removeprefix(">=")
    assert PYPROJECT["tool"]["mypy"]["python_version"] == oldest
    assert PYPROJECT["tool"]["ruff"]["target-version"] == "py" + oldest.replace(".", "")
    for name in ("README.md", "docs/installing.md"):
        assert f"Python {oldest} or newer" in (PROJECT / name).read_text(encoding="utf-8"), name
    script = (PROJECT / "scripts" / "_env.sh").read_text(encoding="utf-8")
    assert f"sys.version_info < ({oldest.replace('.', ', ')})" in script


# ---- what is in the wheel ---------------------------------------------------------------------


def test_the_package_is_flat() -> None:
    """Stops modules in a folder, which the tests of layers and sizes would not see."""
    folders = [p.name for p in (PROJECT / "mttrain").iterdir() if p.is_dir()]
    assert set(folders) <= {"__pycache__"}


def test_an_empty_folder_called_mttrain_hides_nothing(tmp_path: Path) -> None:
    """`git clone` makes a folder of this name; beside it `import mttrain` found that folder, empty,
    and not the package that was installed from it."""
    (tmp_path / "mttrain").mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", "mttrain", "--version"]
    answer = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert answer.stdout.startswith("mttrain ") and not answer.stderr


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build needs; it leaves its traces beside the sources."""
    place = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(PROJECT / name, place / name)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PROJECT / "mttrain", place / "mttrain", ignore=ignore)
    for name in ("tests", "data", "docs", "configs", "build", "runs"):  # must not get in
        (place / name).mkdir()
        (place / name / "__init__.py").touch()
    return place


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built without a network by the hatchling that is installed."""
    output = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--wheel-dir", str(output), str(source)]
    answer = subprocess.run(command, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    (path,) = output.iterdir()
    return path


def test_wheel_holds_the_package_and_no_more(source: Path, wheel: Path) -> None:
    """Stops tests, data or a forgotten folder in the wheel, and a missing py.typed or template."""
    PARTS["check_wheel"](source, wheel)


def test_the_check_of_the_wheel_can_fail(source: Path, wheel: Path, tmp_path: Path) -> None:
    """Stops a check that accepts everything: a file more in the package, and the wheel lacks it."""
    changed = tmp_path / "changed"
    shutil.copytree(source, changed)
    (changed / "mttrain" / "more.html").touch()
    with pytest.raises(PARTS["Wrong"], match=r"lacks \['mttrain/more\.html'\]"):
        PARTS["check_wheel"](changed, wheel)
    (changed / "mttrain" / "more.html").unlink()
    (changed / "README.md").write_text("# other\n", encoding="utf-8")
    with pytest.raises(PARTS["Wrong"], match="long description"):
        PARTS["check_wheel"](changed, wheel)


def test_installed_wheel_needs_no_clone(wheel: Path, tmp_path: Path) -> None:
    """Stops code that finds its files through the repository: the package runs from the wheel's
    files alone, in another directory."""
    shutil.unpack_archive(wheel, tmp_path / "site", format="zip")
    code = "import mttrain, mttrain.cli; print(mttrain.__file__); mttrain.cli.main(['--version'])"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    command = [sys.executable, "-c", code]
    answer = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    place, version = answer.stdout.splitlines()
    assert Path(place).is_relative_to(tmp_path) and version.startswith("mttrain ")


# ---- pins of the lowest versions --------------------------------------------------------------


def resolved(folder: Path, **changes: str) -> Path:
    """A resolution as uv writes it, each package at its bound, but for the changes."""
    bounds = PARTS["bounds"](PROJECT, ["report"])
    lines = [f"{name}=={changes.get(name, bound)}\n" for name, bound in bounds.items()]
    (folder / "resolved.txt").write_text("# a comment\nextra-package==1\n" + "".join(lines))
    return folder / "resolved.txt"


def test_lowest_pins_are_the_bounds(tmp_path: Path) -> None:
    """Stops check_wheel from trying newer versions than the lowest that are promised."""
    pins = PARTS["lowest"](PROJECT, ["report"], resolved(tmp_path))
    assert set(pins) == {
        f"{plain_name(r.name)}=={next(iter(r.specifier)).version}" for r in requirements("report")
    }


def test_bounds_that_nothing_satisfies_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stops a bound that is lower than anything pip can install; on a newer Python it is a note."""
    path = resolved(tmp_path, numpy="99.0")
    monkeypatch.setattr(sys, "version_info", (3, 11))
    with pytest.raises(PARTS["Wrong"], match=r"numpy: the bound is .*, the lowest .* 99\.0"):
        PARTS["lowest"](PROJECT, ["report"], path)
    monkeypatch.setattr(sys, "version_info", (3, 13))
    assert "numpy==99.0" in PARTS["lowest"](PROJECT, ["report"], path)
    assert "numpy" in capsys.readouterr().err


# ---- the image --------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, with what follows them."""
    text = (PROJECT / "Dockerfile").read_text(encoding="utf-8")
    text = re.sub(r"^#.*\n", "", text, flags=re.M).replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in lines]


def test_dockerfile_is_in_order() -> None:
    """Stops a slip in a file that the tests do not build: unknown instructions, arguments that
    are never defined, stages that do not exist, a Python that is too old."""
    found = instructions()
    known = {"ARG", "FROM", "ENV", "RUN", "COPY", "WORKDIR", "USER", "VOLUME", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in found} <= known
    arguments: dict[str, str] = {}
    stages: set[str] = set()
    for name, rest in found:
        if name == "ARG":
            key, _, value = rest.partition("=")
            arguments.setdefault(key, value)
        for variable in re.findall(r"\$\{(\w+)\}", rest):
            assert variable in arguments, f"{name} {rest}"
        if name == "FROM":
            image, *alias = rest.split()
            chosen = image.replace("${BASE}", arguments["BASE"])
            assert chosen in stages or chosen == "python:${PYTHON}-slim", rest
            stages |= set(alias[1:])
        if name == "COPY" and (stage := re.match(r"--from=(\w+)", rest)):
            assert stage[1] in stages
    assert {"cpu", "cuda"} <= stages and arguments["BASE"] == "cpu"
    assert SpecifierSet(TABLE["requires-python"]).contains(arguments["PYTHON"] + ".0")


def test_dockerfile_copies_what_exists_and_is_not_ignored() -> None:
    """Stops a moved file, or one that .dockerignore holds back, from ending the build of the
    image; and a file of the package from being left out of it."""
    lines = (PROJECT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*" and all(rule.startswith("!") for rule in rules[1:])
    sent = {path for rule in rules[1:] for path in PROJECT.glob(rule[1:])}
    for name, rest in instructions():
        if name == "COPY" and not rest.startswith("--from"):
            for origin in rest.split()[:-1]:
                path = PROJECT / origin
                assert path.exists(), origin
                assert path in sent or set(path.glob("*.*")) <= sent, f"{origin} is ignored"
    for name in ("pyproject.toml", "README.md", "LICENSE", "constraints.txt"):
        assert PROJECT / name in sent


def test_dockerfile_installs_and_runs_the_command() -> None:
    """Stops an image with unpinned packages, unknown extras, a cache, or root as its user."""
    found: dict[str, Any] = {}
    for name, rest in instructions():
        found.setdefault(name, []).append(rest)
    (install,) = (x for x in found["RUN"] if "pip install" in x)
    words = shlex.split(install)
    assert "--no-cache-dir" in words and words[words.index("-c") + 1] == "constraints.txt"
    (extras,) = (re.fullmatch(r"\.\[(.+)\]", word) for word in words if word.startswith("."))
    assert extras is not None and set(extras[1].split(",")) <= set(EXTRAS)
    assert found["ENTRYPOINT"] == ['["mttrain"]'] and "mttrain" in TABLE["scripts"]
    assert len(found["USER"]) == 1 and found["USER"][0] not in ("root", "0")
    order = [name for name, _ in instructions()]
    assert order.index("USER") > max(i for i, name in enumerate(order) if name == "RUN")
    assert (
        found["VOLUME"] == ['["/mttrain/data", "/mttrain/runs"]']
        and found["WORKDIR"][-1] == "/mttrain"
    )
