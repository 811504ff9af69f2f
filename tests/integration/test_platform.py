"""Other machines: a C locale, names that are no ASCII, no home, no network, streams that are closed
or broken. Real processes, each doing as much at once as it can, because torch takes seconds to
import."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mttrain.cli import main
from mttrain.config import dump_config
from mttrain.runlog import read_log
from tests.integration.training_help import random_sentences, tiny_config

Capture = pytest.CaptureFixture[str]
MODULE = [sys.executable, "-m", "mttrain"]
ODD = ["the dog", "", "läuft — 狗 🙂", "a\u2028b\x85c", "\ufeffx\x00y", "the small house"]

# What `site` runs at the start of every process: any way out of the machine is told to a file.
SITE = """
import os, socket
def refuse(*values):
    with open(os.environ["NETWORK_USED"], "ab") as file:
        file.write(ascii(values).encode())
    raise OSError("there is no network in this test")
socket.socket.connect = socket.socket.connect_ex = refuse
socket.getaddrinfo = socket.gethostbyname = socket.create_connection = refuse
"""


class Machine:
    """A folder whose name is neither ASCII nor one word, and processes under a C locale."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder / "Läufe und 狗"
        self.folder.mkdir()
        self.model = self.folder / "ein Modell ü"
        shutil.copytree(model, self.model)
        self.network = self.folder / "network used"
        self.no_folder = self.folder / "a file"
        self.no_folder.write_text("where a folder is wanted", encoding="utf-8")
        self.site = self.folder / "site"
        self.site.mkdir()
        (self.site / "sitecustomize.py").write_text(SITE, encoding="utf-8")

    def write(self, name: str, lines: list[str]) -> str:
        path = self.folder / name
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")
        return str(path)

    def environment(self, home: str | None = None) -> dict[str, str]:
        """No locale, no network, no folder for temporary files; `home` None: no HOME either."""
        without = ("PYTHONIOENCODING", "LANG", "LC_CTYPE", "HOME", "PYTHONCOERCECLOCALE")
        values = {name: value for name, value in os.environ.items() if name not in without}
        values |= {"LC_ALL": "C", "PYTHONUTF8": "0", "OMP_NUM_THREADS": "1"}
        values |= {"PYTHONPATH": str(self.site), "NETWORK_USED": str(self.network)}
        values |= {"TMPDIR": str(self.no_folder / "tmp")}
        return values if home is None else values | {"HOME": home}

    def run(
        self, *arguments: str, home: str | None = None, stdin: bytes = b""
    ) -> subprocess.CompletedProcess[bytes]:
        done = subprocess.run(
            [*MODULE, *arguments], input=stdin, capture_output=True, timeout=120,
            env=self.environment(home), cwd=self.folder,
        )  # fmt: skip
        assert b"Traceback" not in done.stderr
        return done

    def shell(self, redirection: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        """The command with streams closed or led elsewhere, as the shell does it."""
        script = f'"$@" {redirection}'
        done = subprocess.run(
            ["sh", "-c", script, "sh", *MODULE, *arguments], stdin=subprocess.DEVNULL,
            capture_output=True, env=self.environment(str(self.folder)), timeout=120,
            cwd=self.folder,
        )  # fmt: skip
        assert b"Traceback" not in done.stderr
        return done


@pytest.fixture
def machine(tmp_path: Path, random_run: Path) -> Machine:
    return Machine(tmp_path, random_run)


def state(folder: Path) -> dict[str, int]:
    """What lies in a folder, and when it was written."""
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


def translated(model: Path, lines: list[str], folder: Path, *options: str) -> bytes:
    """What `translate` gives in this process."""
    source, output = folder / "inside.in", folder / "inside.out"
    source.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")
    arguments = ["--model", str(model), "--input", str(source), "--output", str(output)]
    assert main(["translate", *arguments, *options]) == 0
    return output.read_bytes()


# ---- locale, names, home, network -------------------------------------------------------------


def test_a_bare_machine(machine: Machine, capsys: Capture) -> None:
    """Under LC_ALL=C without Python's UTF-8 mode a configuration that named a file with an umlaut
    ended in a UnicodeEncodeError, and so did every report that names such a file; nothing may
    need HOME, TMPDIR or a network, and a model that is used stays as it is."""
    texts = random_sentences(30, seed=4, shortest=2)
    source, target = machine.write("Quelle ä.txt", texts), machine.write("Ziel 狗.txt", texts[::-1])
    pair = {"source": source, "target": target}
    config = tiny_config(
        machine.folder, {"train": pair, "valid": pair, "test": pair},
        train={"max_steps": 2, "valid_every": 2},
    ).model_copy(update={"run_dir": "mein Lauf ö", "threads": 1})  # fmt: skip
    written = machine.write("Lauf ß.yaml", dump_config(config).split("\n"))

    vocabulary = str(machine.folder / "Wörter 1.json")
    done = machine.run("tokenize", source, target, "--vocab-size", "300", "--output", vocabulary)
    assert done.returncode == 0 and Path(vocabulary).exists()
    assert done.stdout.decode().startswith(f"{vocabulary}, learned from {source}, {target}\n")

    done = machine.run("train", "--config", written)
    assert done.returncode == 0, done.stderr
    assert [row.split("|")[0] for row in done.stdout.decode().splitlines()] == [
        "BLEU", "chrF2", "TER",
    ]  # fmt: skip
    run = machine.folder / "mein Lauf ö"
    assert str(run.relative_to(machine.folder)) in done.stderr.decode()

    nowhere = str(machine.no_folder / "home")
    before = state(machine.model)
    odd, kept = machine.write("Eingabe é.txt", ODD), machine.folder / "Ausgabe è.txt"
    options = ["--model", str(machine.model), "--device", "cpu"]
    done = machine.run("translate", *options, "--input", odd, "--output", str(kept), home=nowhere)
    assert (done.returncode, done.stdout) == (0, b"")
    assert kept.read_bytes() == translated(machine.model, ODD, machine.folder)

    done = machine.run(
        "eval", *options, "--source", odd, "--ref", odd, "--json", "--output", str(kept),
        home=nowhere,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert str(machine.model) in json.loads(done.stdout.decode())["model"][0]
    assert kept.read_bytes() == translated(machine.model, ODD, machine.folder)
    assert state(machine.model) == before
    assert not machine.network.exists(), machine.network.read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_names_that_are_no_text(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """A file whose name is not UTF-8 made `tokenize` fail when its work was done, at the report
    that names the file."""
    folder = tmp_path / os.fsdecode(b"not utf-8 \xff\xe9")
    folder.mkdir()
    text, output = folder / "text", folder / "tokens.json"
    text.write_text("the house\n" * 3, encoding="utf-8")
    assert main(["tokenize", str(text), "--vocab-size", "262", "--output", str(output)]) == 0
    assert output.exists()
    out, err = capfdbinary.readouterr()
    assert b"not utf-8 \\udcff\\udce9" in out and out.decode() and err.decode() == ""
    assert main(["tokenize", str(folder / "none"), "--output", str(output)]) == 3
    assert b"\\udcff\\udce9/none" in capfdbinary.readouterr().err


def test_places_that_cannot_be_made(
    tmp_path: Path, random_run: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run directory, temporary files or an output below a file: one sentence, before anything is
    computed."""
    blocked = tmp_path / "a file"
    blocked.write_text("x", encoding="utf-8")
    text = tmp_path / "text"
    text.write_text("the house\n" * 20, encoding="utf-8")
    pair = {"source": str(text), "target": str(text)}
    config = tiny_config(tmp_path, {"train": pair, "valid": pair})
    path = tmp_path / "run.yaml"
    for run_dir, status in ((blocked / "run", 2), (blocked, 2)):
        settings = dump_config(config.model_copy(update={"run_dir": str(run_dir)}))
        path.write_text(settings, encoding="utf-8")
        assert main(["train", "--config", str(path)]) == status
        err = capsys.readouterr().err
        assert str(blocked) in err and len(err.splitlines()) == 1
    monkeypatch.setattr(tempfile, "tempdir", str(blocked / "tmp"))
    path.write_text(dump_config(config), encoding="utf-8")
    assert main(["train", "--config", str(path), "--dry-run"]) == 3
    assert capsys.readouterr().err.startswith(f"error: {blocked}/tmp/")
    for arguments in (
        ["tokenize", str(text), "--vocab-size", "262"],
        ["translate", "--model", str(random_run), "--input", str(text)],
        ["encode", "--model", str(random_run), "--input", str(text)],
        ["eval", "--model", str(random_run), "--source", str(text), "--ref", str(text)],
    ):
        assert main([*arguments, "--output", str(blocked / "out")]) == 3
        err = capsys.readouterr().err
        assert err.splitlines()[-1].startswith(f"error: {blocked}/out: cannot write it: ")
    assert blocked.read_text(encoding="utf-8") == "x"
    assert sorted(os.listdir(tmp_path)) == ["a file", "run.yaml", "text"]


# ---- closed streams -----------------------------------------------------------------------------


def test_closed_streams_that_are_needed(machine: Machine) -> None:
    """A command whose input or output is closed (`<&-`, `>&-`) says so in one line with status 3,
    before it loads or computes anything."""
    text = machine.write("text", ["the dog"])
    model = ["--model", str(machine.model)]
    scoring = ["eval", "--hyp", text, "--ref", text]
    stdin = b"error: Standard input is closed; give an input file.\n"
    stdout = b"error: Standard output is closed; give an output file.\n"
    for redirection, arguments, error in (
        ("<&-", ["translate", *model], stdin),
        ("<&-", ["eval", "--hyp", "-", "--ref", text], stdin),
        ("<&-", ["encode", *model], stdin),
        (">&-", ["translate", *model, "--input", text], stdout),
        (">&-", scoring, b"error: Standard output is closed; the scores go there.\n"),
    ):
        done = machine.shell(redirection, *arguments)
        assert (done.returncode, done.stdout, done.stderr) == (3, b"", error), arguments


def test_closed_streams_that_are_not_needed(machine: Machine) -> None:
    """With stderr closed, messages went to stdout among the results, or the command failed; with
    stdout closed a result that goes to a file came with status 1. And the first file that a
    process opens took the place of the closed stream: what libraries print was written into it."""
    text, kept = machine.write("text", ODD), machine.folder / "kept"
    model = ["--model", str(machine.model), "--device", "cpu"]
    arguments = ["translate", *model, "--input", text, "--output", str(kept), "--threads", "1"]
    done = machine.shell("<&- >&- 2>&-", *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert kept.read_bytes() == translated(machine.model, ODD, machine.folder)
    done = machine.shell("2>&-", "eval", "--hyp", text, "--ref", text)
    assert (done.returncode, done.stderr) == (0, b"")
    rows = done.stdout.decode().splitlines()
    assert [row.split("|")[0] for row in rows] == ["BLEU", "chrF2", "TER"]
    for arguments in (["eval", "--hyp", text, "--ref", "nowhere"], ["eval", "--debug"], []):
        done = machine.shell("2>&-", *arguments)
        assert (done.returncode, done.stdout) == (3 if "nowhere" in arguments else 2, b"")


def test_training_needs_no_streams(machine: Machine) -> None:
    """With stdout closed a training ended with an error when all was done; messages that go to a
    full disk must not stop it either."""
    texts = random_sentences(30, seed=5, shortest=2)
    text = machine.write("text", texts)
    pair = {"source": text, "target": text}
    config = tiny_config(
        machine.folder,
        {"train": pair, "valid": pair, "test": pair},
        train={"max_steps": 2, "valid_every": 2},
    )
    path = machine.write("run.yaml", dump_config(config).split("\n"))
    done = machine.shell("<&- >&- 2>/dev/full", "train", "--config", path)
    assert (done.returncode, done.stdout) == (0, b"")
    records = read_log(Path(config.run_dir) / "log.jsonl")
    assert [r["kind"] for r in records][-2:] == ["test", "end"]
    assert translated(Path(config.run_dir), ODD, machine.folder).count(b"\n") == len(ODD)


def test_descriptors_of_closed_streams_stay_taken(tmp_path: Path) -> None:
    """With stderr closed the first file that was opened became descriptor 2, and what a library
    writes to that landed in the file."""
    code = (
        "import os, sys; from mttrain.cli import main; main(['--version']); "
        "file = open(sys.argv[1], 'wb'); os.write(2, b'noise'); sys.exit(file.fileno() < 3)"
    )
    path = tmp_path / "file"
    script = '"$@" <&- >&- 2>&-'
    done = subprocess.run(["sh", "-c", script, "sh", sys.executable, "-c", code, str(path)])
    assert done.returncode == 0 and path.read_bytes() == b""


# ---- broken streams ---------------------------------------------------------------------------


def test_nobody_reads_the_results(machine: Machine) -> None:
    """S17: `translate | head -1` and `eval | true` end quietly with status 0."""
    text = machine.write("text", ["the dog"] * 6000)
    arguments = ["translate", "--model", str(machine.model), "--device", "cpu", "--input", text]
    with subprocess.Popen(
        [*MODULE, *arguments, "--beam", "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=machine.environment(),
    ) as process:  # fmt: skip
        assert process.stdout and process.stderr
        assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
    done = machine.shell("| true; exit 0", "eval", "--hyp", text, "--ref", text, "--lang", "de")
    assert re.fullmatch(rb"BLEU tokenizer: 13a \(target language de\)\n.*", done.stderr, re.DOTALL)
    assert b"rror" not in done.stderr


@pytest.mark.parametrize("place", ["full", "pipe"])
def test_nobody_reads_the_messages(place: str, machine: Machine) -> None:
    """A full disk under stderr, or a reader of it that had gone, cost the results: the command
    printed nothing and ended with status 3, or even 0."""
    text = machine.write("text", ["the dog is here"] * 4)
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full", "wb") as full, os.fdopen(writer, "wb") as pipe:
        done = subprocess.run(
            [*MODULE, "eval", "--hyp", text, "--ref", text],
            stdout=subprocess.PIPE, stderr={"full": full, "pipe": pipe}[place],
            env=machine.environment(), timeout=120,
        )  # fmt: skip
    assert done.returncode == 0
    assert len(done.stdout.decode().splitlines()) == 3


def test_messages_cannot_steer_the_terminal(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A name out of somebody's file could clear the screen or set the window's title."""
    monkeypatch.chdir(tmp_path)
    assert main(["eval", "--hyp", "\x1b[2Jx\x07\x9b1m", "--ref", "y"]) == 3
    assert capsys.readouterr().err == "error: \\x1b[2Jx\\x07\\x9b1m: no such file.\n"


def test_a_model_that_does_not_fit_into_memory(tmp_path: Path, capsys: Capture) -> None:
    """A model of a petabyte ended in "unexpected" and the name of an allocator."""
    text = tmp_path / "text"
    text.write_text("the house\n" * 20, encoding="utf-8")
    pair = {"source": str(text), "target": str(text)}
    config = tiny_config(tmp_path, {"train": pair, "valid": pair}, model={"d_ff": 10**13})
    path = tmp_path / "run.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    assert main(["train", "--config", str(path)]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: not enough memory") and "unexpected" not in last
