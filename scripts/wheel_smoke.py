"""Use an installed mttrain from end to end, in the current directory, which must be empty.

    cd EMPTY; ENVIRONMENT/bin/python -P wheel_smoke.py [--mypy PROGRAM]

Every command runs as a user runs it, on a corpus of a few words that is made here: vocabulary,
training, resuming, decoding, scores, exports, report. What comes out is checked for being there and
for being of the right kind, no more: the tests look closer. Warnings of libraries are collected and
shown at the end. `check_wheel` runs this with the newest and with the lowest dependencies.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

WORDS = {
    "the": "das", "small": "kleine", "old": "alte", "house": "Haus", "child": "Kind",
    "horse": "Pferd", "sleeps": "schläft", "runs": "läuft", "sings": "singt",
}  # fmt: skip
CONFIG = """\
run_dir: run
data:
  source_lang: en
  target_lang: de
  train: {source: train.en, target: train.de}
  valid: {source: valid.en, target: valid.de}
tokenizer: {vocab_size: 320}
model: {d_model: 32, d_ff: 64, num_heads: 2, encoder_layers: 1, decoder_layers: 1, norm: pre}
optim: {lr: 5e-3, warmup_steps: 20}
train: {batch_tokens: 256, max_steps: 120, valid_every: 40, keep_last: 3, average: 0, device: cpu}
"""
PROGRAM = """\
from mttrain import TranslateOptions, Translator
translated: list[str] = Translator.load("run").translate(["the house"], TranslateOptions(beam=2))
reveal_type(Translator.load)
"""
WRONG_PROGRAM = "from mttrain import Translator\nnumber: int = Translator.load('run')\n"
SOURCE_LINES = ["the small horse sleeps", "", "the old child sings"]


class Failed(Exception):
    """A step of the walk went wrong; the text says how."""


class Walk:
    """The commands of the walk, and the warnings that they printed."""

    def __init__(self, mypy: str | None) -> None:
        self.program = Path(sysconfig.get_path("scripts")) / "mttrain"
        self.mypy = mypy
        self.warnings: set[str] = set()

    def run(self, *arguments: str, stdin: str = "", program: Sequence[str] = ()) -> str:
        """The standard output of `mttrain ARGUMENTS`, or of another program; Failed if it fails."""
        command = [*(program or [str(self.program)]), *arguments]
        print("  $", " ".join([Path(command[0]).name, *command[1:]]), file=sys.stderr)
        done = subprocess.run(command, input=stdin, capture_output=True, encoding="utf-8")
        self.warnings |= {line for line in done.stderr.splitlines() if "Warning" in line}
        if done.returncode != 0:
            raise Failed(f"status {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout

    def python(self, code: str) -> str:
        """The standard output of a Python program."""
        return self.run("-P", "-W", "default", "-c", code, program=[sys.executable])


def must(condition: object, message: str) -> None:
    """Raise Failed unless `condition` holds."""
    if not condition:
        raise Failed(message)


def write_corpus() -> None:
    """Sentences of four words, the first ones for training; word for word in both languages."""
    words = list(WORDS)
    sentences = [" ".join(x) for x in itertools.product(["the"], words[1:3], words[3:6], words[6:])]
    sentences += [f"{one} and {other}" for one in sentences for other in sentences[:5]]
    for name, part in (("train", sentences[:100]), ("valid", sentences[100:])):
        german = [" ".join(WORDS.get(word, "und") for word in line.split()) for line in part]
        Path(f"{name}.en").write_text("".join(f"{x}\n" for x in part), encoding="utf-8")
        Path(f"{name}.de").write_text("".join(f"{x}\n" for x in german), encoding="utf-8")
    Path("run.yaml").write_text(CONFIG, encoding="utf-8")
    Path("new.en").write_text("".join(f"{x}\n" for x in SOURCE_LINES), encoding="utf-8")


def package(walk: Walk) -> None:
    """The package that is imported is the installed one, and its version that of the metadata."""
    must("Commands:" in walk.run("--help"), "--help lists no commands")
    facts = walk.python(
        "import mttrain, json; from importlib.metadata import version; mttrain.Translator;"
        "print(json.dumps([mttrain.__file__, mttrain.__version__, version('mttrain')]))"
    )
    place, version, installed = json.loads(facts)
    must(Path(place).is_relative_to(sys.prefix), f"mttrain was imported from {place}")
    must(version == installed, f"__version__ is {version}, the metadata say {installed}")
    must(walk.run("--version") == f"mttrain {version}\n", "--version says something else")


def vocabulary(walk: Walk) -> None:
    """A vocabulary by itself, and a line there and back."""
    walk.run("tokenize", "train.en", "train.de", "--vocab-size", "320", "--output", "own.json")
    line = SOURCE_LINES[0] + "\n"
    pieces = walk.run("encode", "--model", "own.json", stdin=line)
    back = walk.run("encode", "--model", "own.json", "--decode", stdin=pieces)
    must(back == line, f"{line!r} came back as {back!r}")


def training(walk: Walk) -> None:
    """A run that is stopped after 80 updates and resumed to 120."""
    walk.run("train", "--config", "run.yaml", "--dry-run")
    walk.run("train", "--config", "run.yaml", "--set", "train.max_steps=80")
    must(Path("run/checkpoints/step-00000080").is_dir(), "no checkpoint at update 80")
    walk.run("train", "--config", "run.yaml")
    must(Path("run/checkpoints/step-00000120").is_dir(), "no checkpoint at update 120")
    records = [json.loads(x) for x in Path("run/log.jsonl").read_text("utf-8").splitlines()]
    last = [int(x["step"]) for x in records if "step" in x][-1]
    must(last == 120, f"the log ends at update {last}")


def decoding(walk: Walk) -> None:
    """As many lines out as in, whatever the search and the arithmetic."""
    ways: tuple[tuple[str, ...], ...] = (
        ("--beam", "1"), ("--beam", "4"), ("--format", "jsonl"), ("--precision", "int8"),
        ("--precision", "bf16"), ("--beam", "3", "--nbest", "2", "--scores"),
    )  # fmt: skip
    for way in ways:
        lines = walk.run("translate", "--model", "run", "--input", "new.en", *way).splitlines()
        each = 2 if "--nbest" in way else 1  # a blank line has one translation, blank
        wanted = sum(each if line else 1 for line in SOURCE_LINES)
        must(len(lines) == wanted, f"{len(lines)} lines instead of {wanted}")
        if "jsonl" in way:
            must([json.loads(x)["source"] for x in lines] == SOURCE_LINES, f"sources: {lines}")
    scores = json.loads(
        walk.run("eval", "--model", "run", "--source", "valid.en", "--ref", "valid.de", "--json")
    )
    must("bleu" in json.dumps(scores).lower(), f"no BLEU in {scores}")
    walk.run("eval", "--hyp", "valid.de", "--ref", "valid.de", "--baseline", "valid.en")


def tools(walk: Walk) -> None:
    """The commands around: a first configuration, a look at a corpus, scores, averages."""
    walk.run("init", "train.en", "train.de", "--valid", "10", "--output", "mine.yaml")
    walk.run("config", "--config", "run.yaml")
    must("complete" in walk.run("completion", "bash"), "no script for the shell")
    walk.run("check", "train.en", "train.de", "--model", "run")
    found = walk.run("score", "--model", "run", "--source", "valid.en", "--target", "valid.de")
    must(found.count("\n") == len(Path("valid.en").read_text("utf-8").splitlines()), found)
    walk.run("average", "run", "--last", "2", "--output", "average")
    must(walk.run("translate", "--model", "average", stdin="the house\n").count("\n") == 1, "lines")


def exports(walk: Walk) -> None:
    """Both formats, each compared with our own translations by the command itself; and used."""
    for target in ("ctranslate2", "huggingface"):
        walk.run("export", "run", f"to-{target}", "--to", target, "--lines", "valid.en")
        must(any(Path(f"to-{target}").iterdir()), f"to-{target} is empty")
    ours = walk.run("translate", "--model", "run", "--input", "valid.en")
    theirs = walk.run(
        "translate", "--model", "to-ctranslate2", "--engine", "ctranslate2", "--input", "valid.en"
    )
    must(ours.count("\n") == theirs.count("\n"), "other lines from CTranslate2")


def pictures(walk: Walk) -> None:
    """The report with its template, a picture of attention, TensorBoard's file."""
    walk.run("report", "run", "--output", "report.html")
    must("<html" in Path("report.html").read_text("utf-8"), "report.html is no HTML")
    walk.run("attention", "run", SOURCE_LINES[0], "--output", "attention.png")
    must(Path("attention.png").read_bytes()[:4] == b"\x89PNG", "attention.png is no PNG")
    walk.run(
        "train", "--config", "run.yaml", "--set", "run_dir=boards", "--set", "train.max_steps=10",
        "--set", "train.tensorboard=true",
    )  # fmt: skip
    must(list(Path("boards").rglob("events.out.tfevents.*")), "no file for TensorBoard")


def types(walk: Walk) -> None:
    """A type checker reads the installed package: a right program passes, a wrong one does not."""
    if walk.mypy is None:
        return
    check = [walk.mypy, "--strict", "--python-executable", sys.executable]
    Path("right.py").write_text(PROGRAM, encoding="utf-8")
    found = walk.run("right.py", program=check)
    must("mttrain.translator.Translator" in found, f"types are not seen: {found}")
    Path("wrong.py").write_text(WRONG_PROGRAM, encoding="utf-8")
    try:
        walk.run("wrong.py", program=check)
    except Failed as refused:
        must("Incompatible types in assignment" in str(refused), str(refused))
    else:
        raise Failed("mypy accepts an int that is a Translator")


STEPS = (package, vocabulary, training, decoding, tools, exports, pictures, types)


def main() -> int:
    """Walk; status 1 when a step fails, with what the command printed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mypy", help="the type checker to try; without it that step is left out")
    if any(Path().iterdir()):
        print("error: the current directory is not empty", file=sys.stderr)
        return 2
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    failures = 0
    walk = Walk(parser.parse_args().mypy)
    write_corpus()
    for step in STEPS:
        print(f"{step.__name__}: {(step.__doc__ or '').partition(':')[0]}", file=sys.stderr)
        try:
            step(walk)
        except Failed as failed:
            failures += 1
            print(f"error: {step.__name__}: {failed}", file=sys.stderr)
            if step is training:  # nothing else can work
                break
    for line in sorted(walk.warnings):
        print(f"warning seen: {line}", file=sys.stderr)
    print(f"{len(STEPS) - failures} of {len(STEPS)} parts worked", file=sys.stderr)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
