"""Reading the pages of the documentation, and running their blocks in a directory made for it.

A page is a list of blocks, run in order: `bash` and `console` in one shell with `-e` and
`pipefail`, `python` in one interpreter, `yaml` checked as a configuration and saved where the text
before it says ("Save this as `mine.yaml`"), `json` parsed. A block of `text`, or without a
language, is output: an error or a signature in it, right behind its commands, must be true. Other
languages fail. Two comments, which no reader sees, steer it:

    <!-- not run: needs a network -->      right before a block: it is not run, for this reason
    <!-- given: big.en runs/mine -->       anywhere: files and runs that the page takes for granted

The directory looks like a clone of the project with little text in it; `STANDARD` says what every
page finds there, and `mine.yaml` is that of the README. Runs that a page names and does not train
are copies of one tiny run of three layers, with six checkpoints.
"""

from __future__ import annotations

import functools
import gzip
import html
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

PROJECT = Path(__file__).resolve().parents[2]
SHIM = Path(__file__).with_name("docs_shim.py")
PAGES = [
    PROJECT / "README.md",
    PROJECT / "CONTRIBUTING.md",
    *sorted((PROJECT / "docs").glob("*.md")),
]
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[\w-]*)\n(?P<body>.*?)^(?P=indent)```$", re.M | re.S
)
NOT_RUN = re.compile(r"<!-- *not run:([^>]*?)-->\s*\Z")
GIVEN = re.compile(r"<!-- *given: *([^>]*?) *-->")
SAVED_AS = re.compile(r"\bas\s+`([\w./-]+\.ya?ml)`")
RUN = re.compile(r"\bruns/[\w-]+")
# Errors, exit statuses, and the signature of a score up to the version.
LASTING = re.compile(r"(error|exit status)\b.*|(BLEU|chrF2|TER)\|.*?\|version")
CONFIG_OPTION = re.compile(r"mttrain train\b[^\n|;&]*?--config\s+(\S+)")


# ---- pages --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and what the page says of it."""

    page: str
    line: int  # of its fence, from 1
    language: str
    body: str
    not_run: str | None  # the reason
    before: str  # the paragraph before it
    follows: bool  # nothing stands between it and the block before it

    @property
    def name(self) -> str:
        return f"{self.page}, line {self.line} ({self.language or 'no language'})"

    @property
    def is_shell(self) -> bool:
        return self.language in ("bash", "sh", "console")

    @property
    def script(self) -> str:
        """What a shell runs; of a console block the lines behind a dollar sign."""
        if self.language != "console":
            return self.body
        return "".join(x[2:] for x in self.body.splitlines(True) if x.startswith("$ "))


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found: list[Block] = []
    end = 0
    for match in FENCE.finditer(text):
        before = text[: match.start()]
        reason = NOT_RUN.search(before)
        indent = len(match["indent"])
        lines = (x[indent:] if x[:indent].isspace() else x for x in match["body"].splitlines(True))
        plain = NOT_RUN.sub("", before).rstrip()
        found.append(
            Block(
                page=page.name,
                line=before.count("\n") + 1,
                language=match["language"],
                body="".join(lines),
                not_run=reason[1].strip() if reason else None,
                before=plain.rpartition("\n\n")[2],
                follows=bool(found) and not text[end : match.start()].strip(),
            )
        )
        end = match.end()
    return found


def saved_as(block: Block) -> str | None:
    """The name of the file that the text before a block tells to save it as."""
    found = SAVED_AS.search(block.before)
    return found[1] if found else None


def fences(page: Path, *languages: str) -> Iterator[str]:
    """The text of the blocks in these languages."""
    for block in blocks(page):
        if block.language in languages:
            yield block.body


def shell_commands(page: Path) -> Iterator[list[str]]:
    """The words of every `mttrain ...` in a shell block, split at pipes."""
    for block in blocks(page):
        if not block.is_shell:
            continue
        for line in block.script.replace("\\\n", " ").splitlines():
            for part in re.split(r" \| | && |; ", line):
                words = _words(part)
                while words and "=" in words[0] and not words[0].startswith("-"):
                    words = words[1:]  # VARIABLE=value before the command
                if words and words[0].split("/")[-1] == "mttrain":
                    yield words[1:]


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text.strip(), comments=True)
    except ValueError:  # a quote that a split has torn
        return []


# ---- what a page finds --------------------------------------------------------------------------

# Path -> lines; {} stands for the language, the rest of the name is the same on both sides.
STANDARD = {
    "data/demo/train.{}": 300,
    "data/demo/valid.{}": 12,
    "data/demo/test.{}": 12,
    "data/demo/test.compositional.{}": 5,
    "data/mine/train.{}": 300,
    "data/mine/valid.{}": 12,
    "data/mine/test.{}": 12,
    "data/multi30k/train.{}": 300,
    "data/multi30k/val.{}": 12,
    "data/multi30k/test_2016_flickr.{}": 12,
    "train.{}": 300,
    "valid.{}": 12,
    "test.{}": 12,
    "new.{}": 12,
    "all.{}": 1050,  # enough to be cut into 500, 500 and a rest
    "other.{}": 12,
}
COPIED = ("configs", "scripts", "docs", "pyproject.toml", "constraints.txt", "README.md")
TINY = """
run_dir: runs/tiny
data:
  source_lang: en
  target_lang: de
  train: {source: data/demo/train.en, target: data/demo/train.de}
  valid: {source: data/demo/valid.en, target: data/demo/valid.de}
tokenizer: {vocab_size: 300}
model: {d_model: 16, d_ff: 32, num_heads: 2, encoder_layers: 3, decoder_layers: 3, norm: pre}
optim: {warmup_steps: 2}
train: {max_steps: 6, valid_every: 1, average: 2}
decode: {max_length: 12}
"""


@functools.cache
def _demo(side: str) -> list[str]:
    text = (PROJECT / "data" / "demo" / f"train.{side}").read_text(encoding="utf-8")
    return text.splitlines()


def demo_lines(language: str, count: int, start: int = 0) -> list[str]:
    """Lines of the demo corpus; other languages than English get the German ones."""
    return _demo("en" if language == "en" else "de")[start : start + count]


def write_given(folder: Path, name: str) -> None:
    """Write a file that a page takes for granted, with what its name promises."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    ending = name.removesuffix(".gz").rpartition(".")[2]
    make = GIVEN_KINDS.get(ending)
    assert make is not None, f"given: {name}: docs_sandbox cannot make such a file"
    pairs = zip(demo_lines("en", 12), demo_lines("de", 12), strict=True)
    lines = [make(*pair) for pair in pairs]
    if ending == "tmx":
        lines = [TMX_HEAD, *lines, "</body></tmx>"]
    if ending == "yaml":
        (text,) = (b.body for b in blocks(PROJECT / "README.md") if saved_as(b) == name)
        lines = text.splitlines()
    data = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)


def _json_pair(en: str, de: str) -> str:
    return json.dumps({"en": en, "de": de, "question": {"en": en, "de": de}}, ensure_ascii=False)


TMX_HEAD = (
    '<?xml version="1.0" encoding="UTF-8"?>\n<tmx version="1.4"><header srclang="en" '
    'creationtool="x" creationtoolversion="1" segtype="sentence" o-tmf="x" adminlang="en" '
    'datatype="plaintext"/><body>'
)
GIVEN_KINDS: dict[str, Callable[[str, str], str]] = {
    "en": lambda en, de: en,
    "de": lambda en, de: de,
    "fr": lambda en, de: de,
    "tsv": lambda en, de: f"{en}\t{de}\t{en}",
    "jsonl": _json_pair,
    "tmx": lambda en, de: (
        f'<tu><tuv xml:lang="en"><seg>{html.escape(en)}</seg></tuv>'
        f'<tuv xml:lang="de"><seg>{html.escape(de)}</seg></tuv></tu>'
    ),
    "yaml": lambda en, de: "",  # that of the README
}
"""Ending -> what becomes of a pair of sentences."""


def make_template(folder: Path) -> None:
    """A directory like a clone of the project, with little text in it."""
    for name in COPIED:
        source = PROJECT / name
        copy = shutil.copytree if source.is_dir() else shutil.copyfile
        copy(source, folder / name)
    for pattern, count in STANDARD.items():
        # Test sentences are none of the training sentences.
        start = 0 if count >= 300 else 5000
        for language in ("en", "de", "fr"):
            path = folder / pattern.format(language)
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = demo_lines(language, count, start)
            path.write_text("".join(f"{x}\n" for x in lines), encoding="utf-8")
    write_given(folder, "mine.yaml")


# ---- running ------------------------------------------------------------------------------------


class Sandbox:
    """A page's directory with its programs."""

    def __init__(self, folder: Path, socket: Path | None) -> None:
        """`socket`: of the server that runs `mttrain`; None: each is a process of its own."""
        self.folder = folder
        programs = folder / ".venv" / "bin"
        programs.mkdir(parents=True, exist_ok=True)
        role = "real" if socket is None else "call"
        flags = "" if socket is None else "-I -S "
        python = shlex.quote(sys.executable)
        start = f"{python} {flags}{shlex.quote(str(SHIM))} {role} {shlex.quote(str(socket))}"
        self._script(programs / "mttrain", f'exec {start} mttrain "$@"')
        self._script(programs / "docs-session", f"exec {start} session")
        self._script(programs / "docs-as-is", f'exec {start} as-is "$@"')
        refusal = 'echo "nothing is installed in a test: mark the block" >&2; exit 1'
        for name in ("pip", "pip3", "uv", "apt", "apt-get", "docker", "curl", "wget"):
            self._script(programs / name, refusal)
        for name in ("python", "python3"):
            refuse_pip = f'case "$*" in *"-m pip"*|*"-m venv"*) {refusal};; esac'
            self._script(programs / name, f'{refuse_pip}\nexec {python} "$@"')
        (programs / "activate").write_text(f'PATH={shlex.quote(str(programs))}:"$PATH"\n')
        self.environment = {
            **os.environ,
            "HOME": str(folder / "home"),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(PROJECT),
            "LC_ALL": "C.UTF-8",
        }
        self.programs = f"{programs}:{Path(sys.executable).parent}"

    @staticmethod
    def _script(path: Path, line: str) -> None:
        path.write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
        path.chmod(0o755)

    def run(self, *words: str) -> None:
        """Run one of the programs."""
        path = f"{self.programs}:{os.environ['PATH']}"
        done = subprocess.run(
            words, cwd=self.folder, env={**self.environment, "PATH": path}, text=True,
            stdin=subprocess.DEVNULL, capture_output=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


class BlockFailed(AssertionError):
    """A block of a page does not work as written."""


class PageRun:
    """The shell and the interpreter in which the blocks of a page are run."""

    def __init__(self, sandbox: Sandbox, blocks: list[Block]) -> None:
        self.sandbox, self.blocks = sandbox, blocks
        self.log = sandbox.folder / "docs.log"
        # A page that activates the environment must do so before its first command.
        activates = any("/activate" in b.script for b in blocks if b.is_shell and not b.not_run)
        programs = [] if activates else [sandbox.programs]
        self.environment = {
            **sandbox.environment,
            "PATH": ":".join([*programs, os.environ["PATH"]]),
        }
        self.workers: dict[str, subprocess.Popen[str]] = {}
        self.ran: list[Block] = []
        self.said = ""  # by the last block

    def run(self) -> None:
        """Run everything; BlockFailed tells which block does not work, and what it said."""
        try:
            for number, block in enumerate(self.blocks):
                if block.not_run is None:
                    self._run_block(number, block)
        finally:
            for worker in self.workers.values():
                assert worker.stdin is not None and worker.stdout is not None
                worker.stdin.close()
                worker.wait()
                worker.stdout.close()

    def _run_block(self, number: int, block: Block) -> None:
        if block.is_shell:
            # The streams of the shell itself are the harness's: a block gets others.
            file = self._file(f"{number}.sh", block.script)
            self._ask("shell", f". {shlex.quote(str(file))} </dev/null 3>&-; echo done >&3", block)
        elif block.language == "python":
            self._ask("session", str(self._file(f"{number}.py", block.body)), block)
        elif block.language in ("yaml", "yml"):
            self._check_yaml(block)
        elif block.language == "json":
            json.loads(block.body)
        elif block.language not in ("", "text"):
            raise BlockFailed(
                f"{block.name}: nobody knows how to run this language; mark the block"
            )
        else:
            if block.follows and self.ran and self.blocks[number - 1] is self.ran[-1]:
                self._check_output(block)
            return
        self.ran.append(block)

    def _check_output(self, block: Block) -> None:
        """What a block of output holds and no model decides must have been said just now."""
        for line in block.body.splitlines():
            part = LASTING.match(line)
            if part is not None and part[0] not in self.said:
                raise BlockFailed(f"{block.name}: this was not said: {part[0]}\n{self.said}")

    def _file(self, name: str, text: str) -> Path:
        folder = self.sandbox.folder / ".blocks"
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
        return folder / name

    def _ask(self, kind: str, line: str, block: Block) -> None:
        """Let a worker execute one line, and wait for its answer."""
        worker = self.workers.get(kind) or self._start(kind)
        assert worker.stdin is not None and worker.stdout is not None
        begin = self.log.stat().st_size
        try:
            worker.stdin.write(line + "\n")
            worker.stdin.flush()
            answer = worker.stdout.readline()
        except BrokenPipeError:
            answer = ""
        self.said = said = self.log.read_bytes()[begin:].decode("utf-8", "replace")
        if not answer:
            raise BlockFailed(f"{block.name} failed.\n--- block\n{block.body}--- output\n{said}")

    def _start(self, kind: str) -> subprocess.Popen[str]:
        words = ["bash", "--norc", "--noprofile", "-eo", "pipefail"]
        if kind == "session":
            words = [str(self.sandbox.folder / ".venv" / "bin" / "docs-session")]
        with open(self.log, "ab") as log:
            worker = subprocess.Popen(
                words, cwd=self.sandbox.folder, env=self.environment, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        self.workers[kind] = worker
        if kind == "shell":
            assert worker.stdin is not None
            worker.stdin.write("exec 3>&1 1>&2\n")
        return worker

    def _check_yaml(self, block: Block) -> None:
        """A whole configuration must be right as it stands, a part of one inside another."""
        import yaml

        from mttrain.config import load_config
        from mttrain.errors import ConfigError

        name = saved_as(block)
        values = yaml.safe_load(block.body)
        whole = isinstance(values, dict) and "run_dir" in values
        if whole:
            path = self.sandbox.folder / (name or ".blocks/example.yaml")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.body, encoding="utf-8")
        else:
            tiny: dict[str, Any] = yaml.safe_load(TINY)
            base = {name: tiny[name] for name in ("run_dir", "data", "train")}
            for section, part in values.items():
                both = isinstance(part, dict) and isinstance(base.get(section), dict)
                base[section] = {**base[section], **part} if both else part
            path = self._file("part.yaml", yaml.safe_dump(base))
        try:
            load_config(path)
        except ConfigError as error:
            raise BlockFailed(f"{block.name} is no configuration:\n{error}") from None


def needed_runs(page_blocks: list[Block], folder: Path) -> set[str]:
    """The run directories that the blocks name and do not train themselves."""
    code = [b.script for b in page_blocks if (b.is_shell or b.language == "python")]
    named = {run for text in code for run in RUN.findall(text)}
    trained = {run for text in code for run in re.findall(r"run_dir=(runs/[\w-]+)", text)}
    for block in page_blocks:
        if block.not_run is None and block.is_shell:
            for config in CONFIG_OPTION.findall(block.script):
                trained |= _run_dirs(config, page_blocks, folder)
    return named - trained


def _run_dirs(config: str, page_blocks: list[Block], folder: Path) -> set[str]:
    """The run_dir of a configuration: of the project, or of a block of the page."""
    texts = [b.body for b in page_blocks if saved_as(b) == config]
    if (folder / config).is_file():
        texts.append((folder / config).read_text(encoding="utf-8"))
    if not texts:  # it is still to be written by `mttrain init`
        return {f"runs/{Path(config).stem}"}
    return {run for text in texts for run in re.findall(r"^run_dir: *(\S+)", text, re.M)}


def prepare(page: Path, folder: Path) -> None:
    """Put into the directory what the page takes for granted."""
    page_blocks, tiny = blocks(page), folder / "runs" / "tiny"
    given = {x for part in GIVEN.findall(page.read_text(encoding="utf-8")) for x in part.split()}
    runs = {name for name in given if RUN.fullmatch(name)}
    for name in given - runs:
        write_given(folder, name)
    for run in runs | needed_runs(page_blocks, folder):
        shutil.copytree(tiny, folder / run)
    shutil.rmtree(tiny)


def start_server(socket: Path, log: IO[bytes]) -> subprocess.Popen[bytes]:
    """The process that runs `mttrain` for the shims; it ends when its stdin is closed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT)}
    server = subprocess.Popen(
        [sys.executable, str(SHIM), "serve", str(socket)], env=environment,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
    )  # fmt: skip
    assert server.stdout is not None
    if server.stdout.readline() != b"ready\n":
        server.communicate()
        log.seek(0)
        raise AssertionError(f"the server did not start:\n{log.read().decode()}")
    return server
