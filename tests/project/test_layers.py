"""The shape of the package, read from its source: layers, sizes, annotations.

A module may import only modules of lower layers, which also rules out import cycles. A new module
gets its line in `LAYERS`; the reason for each layer is in CONTRIBUTING.md.
"""

from __future__ import annotations

import ast
import functools
import io
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "mttrain"
MODULES = {path.stem: path for path in sorted(PACKAGE.glob("*.py")) if path.stem != "__init__"}

# A part that was split off a module stands below it: half a layer where there is no whole one free.
LAYERS: dict[str, float] = {
    "errors": 0,
    "yamlio": 0,
    "languages": 0,
    "cores": 0,  # of machine and encoding
    "aliases": 0,  # of config
    "tags": 0.5,  # of dataconfig, tokenizer and translator
    "settings": 0.5,  # of config
    "dataconfig": 0.75,  # of config
    "linear": 0.5,  # of model
    "rendezvous": 0.5,  # of distributed
    "hashing": 0.5,  # of searchstep and bpedropout
    # What stands on the errors alone.
    "config": 1,
    "corpus": 1,
    "distributed": 1,
    "runlog": 1,
    "metrics": 1,
    "testsets": 1,  # of pairs
    "schema": 1.5,  # of config
    "boards": 1.5,  # of runlog
    "flops": 1.5,  # of utilisation and memory
    "comet_metric": 1.5,  # of metrics
    "shards": 1,  # of pairs
    "pairs": 1.5,  # of corpus
    "pairrules": 1.5,  # of check and encoding
    "textblocks": 1.75,  # of encoding
    "textrules": 1.5,  # of textcheck
    "textsides": 1.5,  # of textcheck
    "textreport": 3.25,  # of textcheck
    "textcheck": 3.5,
    "averaging": 3.5,  # of cli_tools
    "dropout": 1,  # of model
    "machine": 1,  # of distributed
    "masks": 1,  # of model
    "attention": 1.5,  # of model
    "kvcache": 1.5,  # of inference
    "searchstep": 1,  # of search
    # The parts: text to ids, ids to logits, logits to loss, weights to better weights, search.
    "tokenizer": 2,
    "tokenreport": 2.5,  # of tokenizer
    "bpedropout": 2.5,  # of encoding, storewriter and dataset
    "storefiles": 2,  # of store
    "encoding": 2.75,  # of store
    "storewriter": 2.8,  # of store
    "model": 2,
    "pictures": 2,
    "inference": 2.5,  # of model
    "memory": 2.5,
    "loss": 2,
    "optim": 2,
    "search": 2,
    "batching": 2,  # of dataset
    "rundir": 2,  # of checkpoint
    # What judges a corpus, what stores it encoded, what stores a model.
    "check": 3.1,  # reads what a store holds
    "survey": 3.25,  # of starter
    "starter": 3.5,
    "holdout": 3.5,  # of starter
    "store": 3,  # of dataset
    "checkpoint": 3,
    "segments": 3,  # of translator
    "translations": 3,  # of translator
    "mbr": 3.5,
    # Pairs as batches; text to text; the loop; a whole run.
    "dataset": 4,
    "progress": 4,  # of loop
    "engine": 4.75,  # of translator
    "members": 4.8,  # of translator
    "translator": 5,
    "tuning": 5.5,  # of cli_eval_tune
    "parallel": 4.25,  # of update
    "compiling": 2.5,  # of update
    "update": 4.5,  # of loop
    "utilisation": 4.5,  # of loop
    "loop": 5,  # of trainer
    "autobatch": 5,  # of run
    "runsetup": 5,  # of trainer
    "attention_maps": 5.5,
    "rerank": 5.5,
    "validation": 5.5,  # of trainer
    "ct2_files": 5.5,  # of ct2_engine
    "ct2_engine": 5.75,  # of ct2
    "ending": 5.6,  # of run
    "origin": 4,  # of runsetup and run
    "rehearsal": 5.6,  # of run
    "run": 5.75,  # of trainer
    "exporting": 5.9,  # of huggingface and ct2
    "ct2": 6,
    "ct2_cache": 6.1,  # of ct2
    "modelcard": 5.95,  # of huggingface
    "hfcheck": 5.5,  # of huggingface
    "huggingface": 6,
    "trainer": 6,
    "report": 6,
    "report_parts": 6.1,  # of report_page
    "report_page": 6.2,  # of report
    # The command line.
    "cli_checks": 6.25,  # of cli
    "cli_options": 6.5,
    "cli_text": 6.8,
    "cli_decode": 6.75,
    "cli_eval": 6.75,
    "cli_eval_text": 6.6,  # of cli_eval
    "cli_eval_score": 6.65,  # of cli_eval
    "cli_eval_model": 6.7,  # of cli_eval
    "cli_eval_tune": 6.72,  # of cli_eval
    "cli_export": 6.75,
    "cli_attention": 6.75,
    "cli_report": 6.75,
    "cli_start": 6.75,
    "cli_completion": 6.75,
    "cli_train": 6.75,
    "cli_check": 6.85,
    "cli_tools": 6.85,
    "cli": 7,
    "__main__": 8,
}
SLOW_TO_IMPORT = {"torch", "pydantic", "tokenizers", "sacrebleu", "numpy", "safetensors", "yaml"}

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 70
# What hangs at the edge: without it the tool trains, translates and scores all the same.
EDGE = {
    "attention_maps", "averaging", "cli_attention", "cli_check", "cli_completion", "cli_eval_tune",
    "cli_export", "cli_report", "cli_start", "cli_tools", "comet_metric", "ct2", "ct2_cache",
    "ct2_engine", "ct2_files", "exporting", "hfcheck", "holdout", "huggingface", "mbr", "modelcard",
    "pictures", "report", "report_page", "report_parts", "rerank", "schema", "starter", "survey",
    "textcheck", "textreport", "textrules", "textsides", "tuning",
}  # fmt: skip
MAX_CORE_CODE_LINES = 12050  # without blank lines, comments and docstrings
MAX_EDGE_CODE_LINES = 6500
MAX_CORE_MODULES = 77

NO_CODE = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
)  # fmt: skip

each_module = pytest.mark.parametrize("name", sorted(MODULES))
Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def tree(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"), filename=str(MODULES[name]))


def own_imports(node: ast.Import | ast.ImportFrom) -> set[str]:
    """The mttrain modules that one import statement names (`mttrain` itself is no module)."""
    names = [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = ".".join(filter(None, ["mttrain" if node.level else None, node.module]))
        names = [base, *(f"{base}.{name}" for name in names)]
    parts = [name.split(".") for name in names]
    return {part[1] for part in parts if part[0] == "mttrain" and len(part) > 1} & set(MODULES)


def all_imports(name: str) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node


def imports_at_start(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports that run when the module is imported: neither those inside functions nor those
    for type checkers only."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield from imports_at_start(other)
        elif not isinstance(child, Function):
            yield from imports_at_start(child)


def functions(name: str) -> Iterator[Function]:
    for node in ast.walk(tree(name)):
        if isinstance(node, Function):
            yield node


def test_every_module_names_its_layer() -> None:
    """Stops a module from slipping in beside the layers."""
    assert sorted(MODULES) == sorted(LAYERS)
    assert len(MODULES.keys() - EDGE) <= MAX_CORE_MODULES
    assert not [path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()]


@each_module
def test_imports_only_lower_layers(name: str) -> None:
    """Stops upward and sideways imports, inside functions and for type checkers too."""
    for node in all_imports(name):
        for other in own_imports(node):
            assert LAYERS[other] < LAYERS[name], (
                f"{name} (layer {LAYERS[name]}) imports {other} (layer {LAYERS[other]}), "
                f"line {node.lineno}"
            )


def test_search_does_not_know_the_model() -> None:
    """Stops the search from growing model-specific paths: its tests use bare probability tables."""
    assert "model" not in set().union(*map(own_imports, all_imports("search")))


def test_command_line_imports_lazily() -> None:
    """Stops `mttrain --help` from importing torch: read from the source, through all modules that
    the command line imports at its start."""
    pending, seen = ["cli"], set()
    while pending:
        name = pending.pop()
        seen.add(name)
        for node in imports_at_start(tree(name)):
            roots = {alias.name.split(".")[0] for alias in node.names}
            if isinstance(node, ast.ImportFrom):
                roots = {(node.module or "").split(".")[0]}
            heavy = roots & SLOW_TO_IMPORT
            assert not heavy, f"{name}, line {node.lineno}: {heavy} is imported for --help"
            pending.extend(own_imports(node) - seen)


def test_help_loads_nothing_heavy() -> None:
    """The same, asked of the interpreter."""
    code = "import sys, mttrain, mttrain.cli; print(*sorted(sys.modules))"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert not SLOW_TO_IMPORT & set(answer.stdout.split())


@each_module
def test_file_size(name: str) -> None:
    lines = len(MODULES[name].read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_FILE_LINES, f"{name} has {lines} lines: something in it wants its own room"


@each_module
def test_function_size(name: str) -> None:
    for node in functions(name):
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        assert lines <= MAX_FUNCTION_LINES, f"{name}.{node.name} has {lines} lines"


def code_lines(name: str) -> int:
    """Lines that hold code: no blank lines, no comments, no docstrings."""
    text = MODULES[name].read_text(encoding="utf-8")
    code = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (*NO_CODE, tokenize.STRING):
            code.add(token.start[0])
        elif token.type == tokenize.STRING:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node):
            docstring = node.body[0]
            code -= set(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return len(code)


def test_package_size() -> None:
    """One person reads the core in an afternoon: its code; explanations do not count."""
    edge = EDGE & MODULES.keys()
    assert sum(map(code_lines, MODULES.keys() - edge)) <= MAX_CORE_CODE_LINES
    assert sum(map(code_lines, edge)) <= MAX_EDGE_CODE_LINES


@each_module
def test_only_the_command_line_knows_the_edge(name: str) -> None:
    """Deleting an export or a report breaks nothing but its command."""
    if name not in EDGE and name != "cli" and not name.startswith("cli_"):
        found = set().union(*map(own_imports, all_imports(name))) & EDGE
        assert not found, f"{name} imports {', '.join(sorted(found))}"


@each_module
def test_every_function_is_annotated(name: str) -> None:
    for node in functions(name):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        arguments += [a for a in (node.args.vararg, node.args.kwarg) if a is not None]
        bare = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
        assert not bare, f"{name}.{node.name}, line {node.lineno}: no type for {', '.join(bare)}"
        known = node.returns is not None or node.name == "__init__"  # which can only be None
        assert known, f"{name}.{node.name}, line {node.lineno}: no return type"


@each_module
def test_module_says_what_it_does(name: str) -> None:
    assert ast.get_docstring(tree(name)), f"{name} has no docstring"
