#!/usr/bin/env python3
"""Fill the last column of docs/cases.md: the tests whose docstrings name a case.

    scripts/update_cases.py            # rewrites docs/cases.md

Reads the tests' source and imports none of it; needs nothing but Python.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
PAGE = PROJECT / "docs" / "cases.md"
CASE = re.compile(r"\b[A-Z][0-9]{2}\b")
ROW = re.compile(r"^\| ([A-Z][0-9]{2}) \| (.+?) \| .* \|$", re.MULTILINE)
Documented = ast.Module | ast.ClassDef | ast.FunctionDef


def tests_by_case() -> dict[str, list[str]]:
    """Case -> tests that name it, as "unit/test_corpus.py: test_one, test_two"."""
    found: dict[str, dict[str, list[str]]] = {}
    for path in sorted((PROJECT / "tests").rglob("test_*.py")):
        file = path.relative_to(PROJECT / "tests").as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if not isinstance(node, Documented):
                continue
            for case in sorted(set(CASE.findall(ast.get_docstring(node) or ""))):
                names = found.setdefault(case, {}).setdefault(file, [])
                if not isinstance(node, ast.Module):
                    names.append(node.name)
    return {
        case: [f"`{file}`" + ": " * bool(names) + ", ".join(names) for file, names in files.items()]
        for case, files in found.items()
    }


def render(text: str) -> str:
    """The page with its last column brought up to date."""
    tests = tests_by_case()

    def row(match: re.Match[str]) -> str:
        case, title = match[1], match[2]
        return f"| {case} | {title} | {'; '.join(tests.get(case, ['none yet']))} |"

    return ROW.sub(row, text)


def main() -> int:
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
