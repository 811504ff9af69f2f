"""What belongs into the wheel and the source archive, and which versions they ask for.

    python wheel_parts.py content SOURCE WHEEL [ARCHIVE]   # compares them with the project's files
    python wheel_parts.py lowest SOURCE EXTRAS RESOLVED    # pins for pip from uv's resolution
    python wheel_parts.py versions SOURCE EXTRAS           # what is installed of what is asked for

SOURCE is the project's folder, EXTRAS a list with commas. Used by `check_wheel` and by the tests.
`lowest` needs the package `packaging`; nothing here needs mttrain.
"""

from __future__ import annotations

import re
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from email import message_from_string
from email.message import Message
from importlib import metadata
from pathlib import Path
from typing import Any

REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?:\[[\w, -]+\])?(?:>=(?P<lowest>[\w.]+))?")
PACKAGE = "mttrain"
# What stands in the source archive besides the package: all that building it needs, and what
# hatchling adds of itself.
IN_ARCHIVE = {"pyproject.toml", "README.md", "LICENSE", "PKG-INFO", ".gitignore"}


class Wrong(Exception):
    """Something is not as it should be; the text says what."""


def plain_name(name: str) -> str:
    """The name of a distribution as an index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def project(source: Path) -> dict[str, Any]:
    """The table [project] of pyproject.toml."""
    content: dict[str, Any] = tomllib.loads((source / "pyproject.toml").read_text("utf-8"))
    return content["project"]


def bounds(source: Path, extras: Sequence[str]) -> dict[str, str | None]:
    """Each distribution that the package and these extras ask for, and its lowest version."""
    table = project(source)
    wanted = list(table["dependencies"])
    for extra in extras:
        wanted += table["optional-dependencies"][extra]
    found: dict[str, str | None] = {}
    for requirement in wanted:
        match = REQUIREMENT.fullmatch(requirement)
        if match is None:
            raise Wrong(f"requirement {requirement!r} is more than a name and a lower bound")
        name = plain_name(match["name"])
        if name != PACKAGE:
            found[name] = match["lowest"] or found.get(name)
    return found


# ---- content ----------------------------------------------------------------------------------


def package_files(source: Path) -> set[str]:
    """Every file of the package, as a path inside the wheel."""
    return {
        path.relative_to(source).as_posix()
        for path in (source / PACKAGE).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


def check_wheel(source: Path, wheel: Path) -> None:
    """Raise Wrong unless the wheel holds the package, its data and its metadata, and no more."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        info = {name.split("/")[0] for name in names if ".dist-info/" in name}
        if len(info) != 1:
            raise Wrong(f"{wheel.name} has {len(info)} dist-info folders")
        folder = info.pop()
        text = {
            name.removeprefix(f"{folder}/"): archive.read(name).decode("utf-8")
            for name in names
            if name.startswith(f"{folder}/")
        }
    metadata_files = {"METADATA", "WHEEL", "RECORD", "entry_points.txt"}
    metadata_files |= {"licenses/LICENSE"}
    compare(
        f"{wheel.name}, package", package_files(source), names - {f"{folder}/{x}" for x in text}
    )
    compare(f"{wheel.name}, metadata", metadata_files, set(text))
    for problem in metadata_problems(source, message_from_string(text["METADATA"])):
        raise Wrong(f"{wheel.name}: {problem}")
    scripts = project(source)["scripts"]
    entries = [f"{name} = {place}" for name, place in scripts.items()]
    if text["entry_points.txt"].split("\n") != ["[console_scripts]", *entries, ""]:
        raise Wrong(f"{wheel.name}: entry_points.txt is {text['entry_points.txt']!r}")
    if text["licenses/LICENSE"] != (source / "LICENSE").read_text("utf-8"):
        raise Wrong(f"{wheel.name}: another LICENSE")
    if "Tag: py3-none-any" not in text["WHEEL"]:
        raise Wrong(f"{wheel.name} is not for every platform")


def metadata_problems(source: Path, found: Message) -> Iterator[str]:
    """What differs between METADATA and the project."""
    table = project(source)
    version = re.search(
        r'^__version__ = "(.+)"$', (source / PACKAGE / "__init__.py").read_text("utf-8"), re.M
    )
    wanted = {
        "Name": table["name"],
        "Version": version[1] if version else None,
        "Summary": table["description"],
        "Requires-Python": table["requires-python"],
        "License-Expression": table["license"],
        "Description-Content-Type": "text/markdown",
    }
    for key, value in wanted.items():
        if found[key] != value:
            yield f"{key} is {found[key]!r}, not {value!r}"
    if set(found.get_all("Provides-Extra", [])) != {
        plain_name(extra) for extra in table["optional-dependencies"]
    }:
        yield f"the extras are {found.get_all('Provides-Extra')}"
    if str(found.get_payload()).strip() != (source / "README.md").read_text("utf-8").strip():
        yield "the long description is not README.md"


def check_archive(source: Path, archive: Path) -> None:
    """Raise Wrong unless the source archive holds the package and what its build needs."""
    with tarfile.open(archive) as tar:
        names = {member.name.partition("/")[2] for member in tar.getmembers() if member.isfile()}
    compare(archive.name, package_files(source) | IN_ARCHIVE, names)


def compare(what: str, wanted: set[str], found: set[str]) -> None:
    """Raise Wrong unless these are the same."""
    if found != wanted:
        lacking, extra = sorted(wanted - found), sorted(found - wanted)
        raise Wrong(f"{what}: lacks {lacking or 'nothing'}, has besides {extra or 'nothing'}")


# ---- versions ---------------------------------------------------------------------------------


def lowest(source: Path, extras: Sequence[str], resolved: Path) -> list[str]:
    """A pin for each distribution that is asked for by name.

    Raises Wrong when one of them is not at its lower bound, so that the bound promises what nobody
    can install. On a Python newer than the oldest supported one that is only said: old versions of
    some packages are not made for it.
    """
    from packaging.version import Version

    pins = {
        plain_name(name): version
        for name, version in re.findall(r"^([\w.-]+)==(\S+)", resolved.read_text("utf-8"), re.M)
    }
    raised = [
        f"{name}: the bound is {bound}, the lowest that can be installed {pins[name]}"
        for name, bound in bounds(source, extras).items()
        if bound is None or Version(bound) != Version(pins[name])
    ]
    if (
        raised
        and f">={sys.version_info[0]}.{sys.version_info[1]}" == project(source)["requires-python"]
    ):
        raise Wrong("lower bounds that nothing satisfies:\n  " + "\n  ".join(raised))
    for line in raised:
        print(line, file=sys.stderr)
    return [f"{name}=={pins[name]}" for name in bounds(source, extras)]


def versions(source: Path, extras: Sequence[str]) -> str:
    """What is installed, in one line: name and version of all that is asked for by name."""
    return ", ".join(f"{name} {metadata.version(name)}" for name in sorted(bounds(source, extras)))


def main(arguments: list[str]) -> int:
    command, source = arguments[0], Path(arguments[1])
    try:
        if command == "content":
            check_wheel(source, Path(arguments[2]))
            for archive in arguments[3:]:
                check_archive(source, Path(archive))
        elif command == "lowest":
            print("\n".join(lowest(source, arguments[2].split(","), Path(arguments[3]))))
        else:
            print(versions(source, arguments[2].split(",")))
    except Wrong as wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
