"""The command line: exit status, streams, messages, options. Run in the process where that is the
same thing, as a real process where signals, pipes, locale or imports are the point."""

from __future__ import annotations

import gzip
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mttrain import cli, errors
from mttrain.cli import main
from mttrain.tokenizer import Tokenizer, train_tokenizer

MODULE = [sys.executable, "-m", "mttrain"]
SOURCES = ["the small house.", "", "a dog — 狗 — runs", "läuft"]


def run(
    arguments: list[str], stdin: bytes = b"", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """A real `mttrain` process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    return subprocess.run(
        [*MODULE, *arguments], input=stdin, capture_output=True, env=environment, timeout=120
    )


@pytest.fixture
def small_tokenizer(tmp_path: Path) -> str:
    path = tmp_path / "tok.json"
    train_tokenizer(["the house and the dog"] * 3, vocab_size=270).save(path)
    return str(path)


def type_in(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))


Capture = pytest.CaptureFixture[str]
COMMANDS = [
    "init", "config", "tokenize", "check", "encode", "train", "translate", "eval", "score",
    "average", "export", "report", "attention", "positions", "completion",
]  # fmt: skip
"""In the order of --help."""


# ---- start ------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [[], ["train"], ["eval"]], ids=str)
def test_help_imports_nothing_heavy(command: list[str]) -> None:
    """`mttrain --help` took as long as importing torch, because the commands were imported."""
    code = (
        f"import sys; from mttrain.cli import main; status = main([*{command}, '--help']); "
        "print(status, *sorted({name.split('.')[0] for name in sys.modules}), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    status, *modules = done.stderr.split()
    assert status == "0" and "--help" in done.stdout
    heavy = {"torch", "numpy", "tokenizers", "yaml", "sacrebleu", "safetensors", "rich", "tqdm"}
    if not command:  # for the options of a command typer itself may use pydantic
        heavy.add("pydantic")
    assert not heavy & set(modules)


def test_translating_imports_little_besides_torch(random_run: Path) -> None:
    """A model built without data, to compare shapes, made torch import its compiler: 1.2 s."""
    code = (
        "import sys; from mttrain.cli import main; "
        f"main(['translate', '--model', {str(random_run)!r}]); "
        "print(*sys.modules, sep='\\n', file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input="dog\n", capture_output=True, text=True
    )
    loaded = set(done.stderr.splitlines())
    assert done.stdout.count("\n") == 1 and "mttrain.translator" in loaded
    for name in ("trainer", "run", "loop", "dataset", "optim", "metrics"):
        assert f"mttrain.{name}" not in loaded
    assert not loaded & {"sacrebleu", "torch._dynamo", "sympy", "torch.utils.tensorboard"}


def test_version_and_help(capsys: Capture) -> None:
    """Both are results: status 0, on stdout; no command at all is wrong usage."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("mttrain 0.")
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    listed = [line.split()[0] for line in text.split("Commands:\n")[1].splitlines()]
    assert listed == COMMANDS
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Commands:" in err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_help(command: str, capsys: Capture) -> None:
    """An option without a word of help is found by nobody."""
    assert main([command, "--help"]) == 0
    lines = capsys.readouterr().out.split("Options:\n")[1].splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("  -"):
            described = len(line.split("  ")) > 2 or following.startswith(" " * 10)
            assert described, line


# ---- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "--hyp", "x", "--ref", "x", "--lang", "cn"], "error: --lang cn is not"),
        (["trian"], "error: No such command 'trian'. Did you mean 'train'?"),
        (["train", "--cofig", "x"], "error: No such option: --cofig (Possible options: --config)"),
        (["train"], "error: Name the configuration: --config X.yaml."),
        (["train", "--config", "nowhere.yaml"], "error: nowhere.yaml: no such file"),
        (["translate"], "error: Name the model: --model RUN."),
        (["translate", "--model", "x", "--beam", "no"], "error: Invalid value for '--beam'"),
        (["translate", "--model", "x", "--format", "xml"], "error: Invalid value for '--format'"),
        (["encode"], "error: Name the model: --model RUN."),
        (["tokenize"], "error: There is no text to learn from"),
        (["tokenize", "--vocab-size", "9", "x"], "error: tokenizer.vocab_size is 9"),
        (["tokenize", "--vocab-size", "0", "x"], "error: tokenizer.vocab_size is 0"),
        (["tokenize", "x", "--separate"], "error: --separate needs both --source and --target."),
        (["tokenize", "--config", "x", "--separate"], "error: With --config its tokenizer.shared"),
        (["train", "--config", "x", "--dry-run", "--fresh"], "error: --dry-run starts no run"),
        (["encode", "--model", "x", "--side", "source"], "error: x is one vocabulary: --side has"),
        (["tokenize", "x", "--source", "y"], "error: Give FILES"),
        (["tokenize", "x", "--set", "seed=2"], "error: --set changes a setting of --config"),
        (
            ["eval", "--hyp", "x"],
            "error: Name the reference: --ref F, --pairs F or --test-set NAME.",
        ),
        (["eval", "--ref", "x"], "error: Give either --model RUN with --source F, or --hyp F."),
        (["eval", "--ref", "x", "--hyp", "y", "--model", "z"], "error: Give either --model"),
        (["eval", "--ref", "x", "--model", "z"], "error: --model needs the text to translate"),
        (
            ["eval", "--ref", "x", "--hyp", "y", "--beam", "3", "--source", "z"],
            "error: No effect with --hyp, which is translated already: --beam, --source.",
        ),
        (
            ["eval", "--ref", "x", "--hyp", "x", "--device", "cpu", "--precision", "auto"],
            "error: No effect with --hyp, which is translated already: --precision, --device.",
        ),
        (["eval", "--ref", "x", "--hyp", "y", "--samples", "9"], "error: --samples has an effect"),
        (
            ["eval", "--ref", "x", "--hyp", "y", "--lang", "de", "--tokenize", "13a"],
            "error: --tokenize decides what --lang would choose",
        ),
        (
            ["eval", "--ref", "-", "--hyp", "-"],
            "error: Only one of the files can be standard input",
        ),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(
    arguments: list[str], message: str, capsys: Capture, tmp_path: Path, monkeypatch: Any
) -> None:
    """C03: wrong usage ended in a traceback, or an option without effect passed silently: a device
    for a file to be scored, a side of a file, `--fresh` beside `--dry-run`; and 0 was taken for
    "not given"."""
    monkeypatch.chdir(tmp_path)
    Path("x").write_text("some text\n", encoding="utf-8")
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(message)
    assert len(err.splitlines()) <= 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nbest", "3"], "--nbest 3 is more than --beam 2 can give; raise --beam."),
        (["--beam", "2", "--nbest", "3"], "--nbest 3 is more than --beam 2 can give"),
        (["--beam", "0"], "--beam is 0"),  # 0 was taken for "not given"
        (
            ["--top-k", "3"],
            "--top-k and --top-p have an effect only together with --sample",
        ),
        (["--seed", "3"], "--seed has an effect only together with --sample"),
        (["--sample", "--beam", "3"], "--sample draws instead of searching: --beam has no effect"),
        (["--sample", "--temperature", "0"], "--temperature is 0"),
        (["--batch-size", "3", "--batch-tokens", "30"], "--batch-tokens or --batch-size, not both"),
        (["--min-length", "30", "--max-length", "20"], "--min-length 30 and EOS do not fit"),
        (["--split-long", "--nbest", "2"], "with --split-long there is one output for a line"),
        (["--format", "jsonl", "--scores"], "--format jsonl always holds the scores"),
        (["--device", "gpu"], "device 'gpu' is unknown"),
        (["--input", "-", "--prefix", "-"], "Only one of the files can be standard input"),
    ],
)
def test_contradicting_decoding_options(
    options: list[str], message: str, random_run: Path, capsys: Capture
) -> None:
    """An option that does nothing, or more outputs than the beam holds, is refused (S06);
    messages named fields of the library, which nobody finds in --help."""
    assert main(["translate", "--model", str(random_run), *options]) == 2
    err = capsys.readouterr().err
    assert message in err and len(err.splitlines()) == 1


def test_configuration_errors_are_all_printed(files: Any, capsys: Capture) -> None:
    """C03: exit status 2 and a line for each problem, with file, line and key."""
    path = files("run.yaml", ["seed: x", "optm: {lr: 1}", "train: {max_steps: 0}"])
    assert main(["train", "--config", path, "--set", "decode.beam=0"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert f"error: {path}:1: seed: wants a whole number, got x" in lines
    assert f"error: {path}:2: optm: unknown key (did you mean 'optim'?)" in lines
    assert lines[-1] == "error: --set decode.beam: must be at least 1, got 0"


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["tokenize", "nowhere.txt"], 3, "error: nowhere.txt: "),
        (["encode", "--model", "nowhere"], 4, "error: nowhere does not exist"),
        (["translate", "--model", "nowhere", "--input", "x"], 4, "error: nowhere does not exist"),
        (["translate", "--model", "x", "--input", "nowhere"], 3, "error: nowhere: no such file."),
        (["eval", "--hyp", "x", "--ref", "nowhere"], 3, "error: nowhere: no such file."),
        (["eval", "--hyp", "x", "--ref", "y"], 3, "error: x has 1 line but y has 2"),
        (["eval", "--hyp", "y", "--ref", "x"], 3, "error: y has 2 lines but x has 1"),
        (["eval", "--hyp", "y", "--ref", "y", "--ref", "x"], 3, "error: x has 1 line but y has 2"),
        (["eval", "--hyp", "x", "--ref", "x", "--baseline", "y"], 3, "error: y has 2 lines but x"),
        (["eval", "--hyp", "empty", "--ref", "empty"], 3, "error: There are no lines to score"),
        (["eval", "--hyp", "bad", "--ref", "y"], 3, "error: bad, line 2, byte offset 2: byte 0xff"),
        (["tokenize", "bad"], 3, "error: bad, line 2, byte offset 2"),
        (["tokenize", "empty"], 3, "error: There is no text to learn a tokenizer from"),
        (["tokenize", "bad", "--output", "no/where.json"], 3, "error: no/where.json: cannot write"),
    ],
)
def test_data_and_model_errors(
    arguments: list[str],
    status: int,
    message: str,
    capsys: Capture,
    tmp_path: Path,
    files: Any,
    monkeypatch: Any,
) -> None:
    """E03, E06, T07: files that are missing, empty, of unequal length or not UTF-8 end in one line
    that names them; a score of what zip pairs is never printed."""
    monkeypatch.chdir(tmp_path)
    files("x", ["eine Zeile"])
    files("y", ["eine Zeile", "noch eine"])
    files("empty", b"")
    files("bad", b"a\n\xff\n")
    assert main(arguments) == status
    out, err = capsys.readouterr()
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith(message)


def one_off(monkeypatch: Any, error: BaseException | Callable[[], None]) -> None:
    """Give the app a command `boom` that ends so, for this test."""

    def boom(debug: bool = False) -> None:
        if isinstance(error, BaseException):
            raise error
        error()

    monkeypatch.setattr(cli.app, "registered_commands", list(cli.app.registered_commands))
    cli.app.command("boom")(boom)


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (errors.MttrainError("x"), 1, "error: x\n"),
        (errors.ConfigError("a\nb"), 2, "error: a\nerror: b\n"),
        (errors.MissingDependency("x"), 2, "error: x\n"),
        (errors.TokenizerError("x"), 3, "error: x\n"),
        (errors.CheckpointError("x"), 4, "error: x\n"),
        (errors.TrainingError("x"), 5, "error: x\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (SystemExit(7), 7, ""),
        (BrokenPipeError(), 0, ""),
        (OSError(28, "No space left on device", "f"), 3, "error: f: No space left on device\n"),
        (
            KeyError("k\nl"),
            1,
            "error: KeyError: 'k\\nl'\n"
            "This is unexpected; the same command with --debug shows where it happened.\n",
        ),
    ],
)
def test_exit_status_of_errors(
    error: BaseException, status: int, text: str, monkeypatch: Any, capfd: Any
) -> None:
    """Every error is printed in one place, without a traceback, with its own status."""
    one_off(monkeypatch, error)
    monkeypatch.setattr(os, "dup2", lambda *_: None)  # keeps the test's own stdout
    assert main(["boom"]) == status
    out, err = capfd.readouterr()
    assert (out, err) == ("", text)


def test_debug_shows_the_traceback(monkeypatch: Any, capsys: Capture) -> None:
    one_off(monkeypatch, errors.DataError("x"))
    assert main(["boom", "--debug"]) == 3
    err = capsys.readouterr().err
    assert err.startswith("Traceback") and err.endswith("error: x\n")


def test_sigterm_ends_like_an_exception(monkeypatch: Any, capsys: Capture) -> None:
    """R20: a terminated command left its temporary file behind; and the handler must not stay."""
    one_off(monkeypatch, lambda: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    assert main(["boom"]) == 143
    assert capsys.readouterr().err == "terminated\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_order_that_torchrun_repeats_is_one(monkeypatch: Any, capsys: Capture) -> None:
    """R20: the second of them came while what was encoded was being saved, and ended that."""
    saved = []

    def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            saved.append(True)

    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    one_off(monkeypatch, work)
    assert main(["boom"]) == 143 and saved
    assert capsys.readouterr().err == "terminated\n"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["INT", "TERM"]
)
def test_signals_end_a_waiting_process(number: int, status: int, small_tokenizer: str) -> None:
    """R20: Ctrl-C printed a wall of traceback; status 0 after a kill."""
    command = [*MODULE, "encode", "--model", small_tokenizer]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin and process.stdout and process.stderr
        process.stdin.write(
            b"the house\n" * 2000
        )  # enough to see that it works, not to fill a pipe
        process.stdin.flush()
        assert process.stdout.readline()
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
    assert process.returncode == status
    assert err.decode().splitlines() in (["interrupted"], ["terminated"])


# ---- streams ----------------------------------------------------------------------------------


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_closed_pipe_is_quiet(unbuffered: str, small_tokenizer: str, files: Any) -> None:
    """S17: `| head -1` ended in a traceback, sometimes twice, with a varying status."""
    big = files("big.txt", ["the house and the dog"] * 50000)
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    command = [*MODULE, "encode", "--model", small_tokenizer, "--input", big]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout and process.stderr
        assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_full_disk_is_one_line(small_tokenizer: str) -> None:
    """Output to a full device was lost with status 0, or ended in two tracebacks at exit."""
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*MODULE, "encode", "--model", small_tokenizer],
            input=b"the house\n" * 10,
            stdout=full,
            stderr=subprocess.PIPE,
        )
    assert done.returncode == 3
    assert done.stderr == b"error: standard output: cannot write it: No space left on device.\n"


def test_utf8_whatever_the_locale(small_tokenizer: str, files: Any) -> None:
    """Under LC_ALL=C or Latin-1 output failed at the first umlaut, or was recoded."""
    path = files("lä.txt", ["Gr\u00fc\u00dfe \u2603 \U0001f642"])
    ids = run(["encode", "--model", small_tokenizer, "--ids", "--input", path])
    for extra in (
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"PYTHONIOENCODING": "latin-1"},
    ):
        arguments = ["encode", "--model", small_tokenizer, "--decode", "--ids"]
        done = run(arguments, ids.stdout, extra)
        assert (done.returncode, done.stderr) == (0, b"")
        assert done.stdout == "Gr\u00fc\u00dfe \u2603 \U0001f642\n".encode()


def test_first_answer_comes_before_the_second_question(random_run: Path) -> None:
    """S18: with batch size 1 the answer to line 1 appeared only after line 2 was typed; the end of
    the input is normal."""
    command = [*MODULE, "translate", "--model", str(random_run), "--batch-size", "1"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin and process.stdout and process.stderr
        answers = []
        for line in (b"the house\n", b"the dog\n"):
            process.stdin.write(line)
            process.stdin.flush()
            answers.append(process.stdout.readline())
        process.stdin.close()
        assert process.stdout.read() == b""
        assert b"2 lines" in process.stderr.read()
    assert process.returncode == 0
    assert all(answer.endswith(b"\n") for answer in answers)


# ---- tokenize and encode ----------------------------------------------------------------------

ENGLISH = ["the small house", "a small dog runs", "the dog is small"] * 4
GERMAN = ["das kleine Haus", "ein kleiner Hund l\u00e4uft", "der Hund ist klein"] * 4


def test_tokenize_learns_one_vocabulary(files: Any, capsys: Capture, tmp_path: Path) -> None:
    """The report goes to stdout; what the text could not give is told on stderr (K05)."""
    output = tmp_path / "tok.json"
    texts = [files("a.en", ENGLISH), files("a.de", GERMAN)]
    assert main(["tokenize", *texts, "--vocab-size", "500", "--output", str(output)]) == 0
    out, err = capsys.readouterr()
    size = Tokenizer.load(output).size
    assert 260 < size < 500
    assert f"{size} tokens, not 500" in err
    assert f"vocabulary   {size} tokens" in out and "round trip   0 lines changed" in out
    assert len(out.splitlines()) == 6


def test_tokenize_two_vocabularies_from_a_configuration(
    files: Any, capsys: Capture, tmp_path: Path
) -> None:
    """With shared: false each language gets its own file, from its own side of the corpora; size
    and level come from the configuration, the command line wins."""
    config = files(
        "run.yaml",
        [
            "run_dir: x",
            "data:",
            "  source_lang: en",
            "  target_lang: de",
            f"  train: {{source: {files('a.en', ENGLISH)}, target: {files('a.de', GERMAN)}}}",
            "  valid: {source: v, target: v}",
            "tokenizer: {shared: false, vocab_size: 270}",
            "model: {tie: target}",
            "train: {max_steps: 1}",
        ],
    )
    output = tmp_path / "v" / "tokenizer.json"
    output.parent.mkdir()
    arguments = ["tokenize", "--config", config, "--output", str(output)]
    assert main(arguments) == 0
    source = Tokenizer.load(tmp_path / "v" / "tokenizer.source.json")
    target = Tokenizer.load(tmp_path / "v" / "tokenizer.target.json")
    assert (source.size, target.size) == (270, 270)
    assert len(source.encode("small")) < len(target.encode("small"))
    assert main([*arguments, "--level", "character", "--vocab-size", "265"]) == 0
    single = Tokenizer.load(tmp_path / "v" / "tokenizer.source.json")
    assert single.pieces("small dog") == list("small\u2581dog")
    assert main([*arguments, "--set", "tokenizer.shared=true"]) == 0
    assert output.exists()
    capsys.readouterr()
    assert main(["tokenize", "--config", config, config, "--output", str(output)]) == 2
    assert "says shared: false; give both --source and --target" in capsys.readouterr().err


def test_tokenize_reads_stdin(monkeypatch: Any, capsys: Capture, tmp_path: Path) -> None:
    """Learning and reporting both need the text, and stdin can be read only once."""
    type_in(monkeypatch, b"the house\nthe house\n")
    path = str(tmp_path / "t.json")
    assert main(["tokenize", "-", "--vocab-size", "262", "--output", path]) == 0
    assert "2 lines, 4 words" in capsys.readouterr().out


@pytest.mark.parametrize("ids", [[], ["--ids"]])
def test_encode_and_back(
    ids: list[str], small_tokenizer: str, monkeypatch: Any, capsys: Capture
) -> None:
    """T17, K15: pieces and numbers of any text lead back to it, also where it holds spaces, the
    space sign, or what looks like a control token."""
    lines = [
        "the  house",
        "",
        " \u2581 <0x0A> </s> <pad>",
        "tab\there \u2028 \x85 \u72d7\U0001f642",
    ]
    text = "".join(f"{line}\n" for line in lines)
    type_in(monkeypatch, text.encode())
    assert main(["encode", "--model", small_tokenizer, *ids]) == 0
    encoded = capsys.readouterr().out
    assert encoded.count("\n") == len(lines)
    type_in(monkeypatch, encoded.encode())
    assert main(["encode", "--model", small_tokenizer, "--decode", *ids]) == 0
    assert capsys.readouterr().out == text


@pytest.mark.parametrize(
    ("line", "options", "message"),
    [
        ("12 270", ["--ids"], "'270' is no token number (0 to 269)."),
        ("12 -1", ["--ids"], "'-1' is no token number"),
        ("12 x", ["--ids"], "'x' is no token number"),
        ("the nonsense", [], "'nonsense' is no piece of the vocabulary."),
    ],
)
def test_decode_names_the_line(
    line: str, options: list[str], message: str, small_tokenizer: str, files: Any, capsys: Capture
) -> None:
    """An id beyond the vocabulary was an IndexError, a negative one counted from the end."""
    path = files("in.txt", ["", line])
    assert main(["encode", "--model", small_tokenizer, "--decode", "--input", path, *options]) == 3
    assert capsys.readouterr().err.startswith(f"error: {path}, line 2: {message}")


# ---- translate --------------------------------------------------------------------------------


def translate(run_dir: Path, *options: str) -> int:
    return main(["translate", "--model", str(run_dir), "--device", "cpu", *options])


def test_translate_gives_a_line_for_a_line(random_run: Path, files: Any, capsys: Capture) -> None:
    """T07, T08: blank lines stay in place, bytes that are not UTF-8 are replaced and counted, and
    the summary goes to stderr."""
    path = files("in.txt", "\n".join(SOURCES).encode() + b"\nbad \xff byte\n")
    assert translate(random_run, "--input", path) == 0
    out, err = capsys.readouterr()
    lines = out.split("\n")[:-1]
    assert len(lines) == 5
    assert [bool(line) for line in lines] == [True, False, True, True, True]
    assert err.startswith("5 lines, 1 of them blank")
    assert "1 line held bytes that are not UTF-8; they were replaced by U+FFFD: line 5" in err


def test_translate_files_and_streams_agree(
    random_run: Path, files: Any, capsys: Capture, monkeypatch: Any, tmp_path: Path
) -> None:
    """stdin, a file, a gzip file and any batch size give the same lines."""
    text = "".join(f"{line}\n" for line in SOURCES).encode()
    type_in(monkeypatch, text)
    assert translate(random_run) == 0
    expected = capsys.readouterr().out
    packed = files("in.gz", gzip.compress(text))
    output = tmp_path / "out.txt.gz"
    options = ["--input", packed, "--output", str(output), "--batch-size", "1"]
    assert translate(random_run, *options) == 0
    assert capsys.readouterr().out == ""
    assert gzip.decompress(output.read_bytes()).decode() == expected


def test_translate_layouts(random_run: Path, files: Any, capsys: Capture) -> None:
    """n-best lists, scores and JSON tell the same outputs; JSON is one object per line."""
    path = files("in.txt", SOURCES)
    arguments = ["--input", path, "--beam", "3", "--nbest", "3"]
    assert translate(random_run, *arguments) == 0
    rows = [line.split(" ||| ") for line in capsys.readouterr().out.split("\n")[:-1]]
    assert [int(row[0]) for row in rows] == [0, 0, 0, 1, 2, 2, 2, 3, 3, 3]
    assert translate(random_run, *arguments, "--format", "jsonl") == 0
    objects = [json.loads(line) for line in capsys.readouterr().out.split("\n")[:-1]]
    assert [item["line"] for item in objects] == [1, 2, 3, 4]
    assert [item["source"] for item in objects] == SOURCES
    texts = [h["text"] for item in objects for h in item["hypotheses"]]
    assert texts == [row[1] for row in rows]
    assert objects[1]["flags"] == ["blank"]


def test_translate_takes_the_decode_settings_of_the_run(
    random_run: Path, files: Any, capsys: Capture
) -> None:
    """E10: without options `translate` searches as the run's configuration says, which is what its
    test score was made with; the command line wins."""
    path = files("in.txt", SOURCES)
    assert translate(random_run, "--input", path) == 0
    default = capsys.readouterr().out
    saved = ["--beam", "2", "--length-penalty", "0.5", "--max-length", "12"]
    assert translate(random_run, "--input", path, *saved) == 0
    assert capsys.readouterr().out == default
    assert translate(random_run, "--input", path, "--max-length", "2", "--format", "jsonl") == 0
    objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(len(item["ids"]) <= 2 for item in objects)


def test_translate_ensemble_and_prefix(random_run: Path, files: Any, capsys: Capture) -> None:
    """An ensemble of a model with itself is that model; outputs begin with their prefixes, and as
    many prefixes as lines are wanted."""
    path = files("in.txt", ["the house", "the dog"])
    assert translate(random_run, "--input", path) == 0
    single = capsys.readouterr().out
    assert translate(random_run, "--input", path, "--model", str(random_run)) == 0
    assert capsys.readouterr().out == single
    prefix = files("prefix.txt", ["Haus", ""])
    assert translate(random_run, "--input", path, "--prefix", prefix) == 0
    forced = capsys.readouterr().out.splitlines()
    assert forced[0].startswith("Haus") and forced[1] == single.splitlines()[1]
    short = files("short.txt", ["Haus"])
    output = Path(path).parent / "out.txt"
    options = ["--input", path, "--prefix", short, "--output", str(output)]
    assert translate(random_run, *options) == 3
    assert "prefix" in capsys.readouterr().err
    assert not output.exists() and not list(output.parent.glob(".tmp*"))


def test_sampling_is_repeatable(random_run: Path, files: Any, capsys: Capture) -> None:
    path = files("in.txt", ["the house", "the dog"])
    outputs = []
    for seed in ("1", "1", "2"):
        assert translate(random_run, "--input", path, "--sample", "--seed", seed) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]


def test_damaged_decode_settings_are_a_checkpoint_error(
    random_run: Path, files: Any, capsys: Capture, tmp_path: Path
) -> None:
    """A hand-edited meta.json must not end in a traceback."""
    (checkpoint,) = (random_run / "checkpoints").glob("step-*")
    copy = tmp_path / "model"
    copy.mkdir()
    for file in checkpoint.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    meta = json.loads((copy / "meta.json").read_text(encoding="utf-8"))
    meta["decode"] = {"beam": "wide"}
    (copy / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    assert translate(copy, "--input", files("in.txt", ["x"])) == 4
    assert "the decode section of meta.json is damaged" in capsys.readouterr().err


# ---- eval -------------------------------------------------------------------------------------

REFERENCE = ["Das kleine Haus.", "Ein Hund l\u00e4uft schnell weg.", "Der Hund ist klein, nicht?"]
HYPOTHESIS = ["Das kleine Haus.", "Ein Hund l\u00e4uft weg.", "der Hund war klein."]


def scores(capsys: Capture, *arguments: str) -> dict[str, Any]:
    assert main(["eval", *arguments, "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_eval_equals_sacrebleu(files: Any, capsys: Capture) -> None:
    """E04, E08: the figures are those of sacreBLEU's own command, whatever the order of the
    references."""
    hyp, ref = files("hyp", HYPOTHESIS), files("ref", REFERENCE)
    other = files("other", ["Das Haus.", "Ein Hund rennt weg.", "Der Hund war klein."])
    done = subprocess.run(
        [sys.executable, "-m", "sacrebleu", ref, other, "-i", hyp, "-m", "bleu", "chrf", "ter",
         "-b", "-w", "2"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    expected = [float(word) for word in done.stdout.replace(",", " ").split() if word[0].isdigit()]
    for refs in ([ref, other], [other, ref]):
        found = scores(capsys, "--hyp", hyp, *(x for name in refs for x in ("--ref", name)))
        assert [round(score["value"], 2) for score in found["scores"]] == expected
        assert all("nrefs:2" in score["signature"] for score in found["scores"])


def test_eval_prints_signature_and_tells_the_tokenizer(files: Any, capsys: Capture) -> None:
    """E02, E07: figures made with another tokenizer or case were compared with each other."""
    hyp, ref = files("hyp", [x.lower() for x in REFERENCE]), files("ref", REFERENCE)
    assert main(["eval", "--hyp", hyp, "--ref", ref, "--lang", "de"]) == 0
    out, err = capsys.readouterr()
    assert "case:mixed" in out and "tok:13a" in out and len(out.splitlines()) == 3
    assert err == "BLEU tokenizer: 13a (target language de)\n"
    mixed = scores(capsys, "--hyp", hyp, "--ref", ref)["scores"][0]
    lower = scores(capsys, "--hyp", hyp, "--ref", ref, "--lowercase")["scores"][0]
    assert mixed["value"] < lower["value"] == pytest.approx(100.0)
    assert "case:lc" in lower["signature"]


def test_eval_of_chinese(files: Any, capsys: Capture) -> None:
    """E02: the default tokenizer takes a Chinese sentence for one word; that is warned of, and the
    language chooses the right one."""
    hyp = files("hyp", ["\u8fd9\u662f\u4e00\u4e2a\u5c0f\u623f\u5b50\u3002"] * 4)
    ref = files("ref", ["\u8fd9\u662f\u4e00\u4e2a\u5927\u623f\u5b50\u3002"] * 4)
    assert main(["eval", "--hyp", hyp, "--ref", ref]) == 0
    assert "warning: Most letters belong to scripts written without" in capsys.readouterr().err
    assert main(["eval", "--hyp", hyp, "--ref", ref, "--lang", "zh"]) == 0
    out, err = capsys.readouterr()
    assert "tok:zh" in out and err == "BLEU tokenizer: zh (target language zh)\n"
    assert main(["eval", "--hyp", hyp, "--ref", ref, "--tokenize", "nonsense"]) == 2
    assert "Unknown BLEU tokenizer 'nonsense'" in capsys.readouterr().err


def test_eval_shows_the_hint_on_tokenised_text(files: Any, capsys: Capture) -> None:
    """E01: tokenised text scores another number; sacreBLEU's warning was hidden."""
    hyp = files("hyp", ["Das kleine Haus ."] * 4)
    assert main(["eval", "--hyp", hyp, "--ref", files("ref", ["Das kleine Haus."] * 4)]) == 0
    assert "warning: 4 of 4 hypothesis lines end in a tokenized period" in capsys.readouterr().err


def test_eval_ignores_windows_line_ends(files: Any, capsys: Capture) -> None:
    """E11: a byte order mark or CRLF must not cost points; U+2028 ends no line."""
    ref = files("ref", REFERENCE)
    clean = scores(capsys, "--hyp", files("clean", HYPOTHESIS), "--ref", ref)
    noisy = b"\xef\xbb\xbf" + "\r\n".join(HYPOTHESIS).encode() + b"\r\n"
    assert scores(capsys, "--hyp", files("noisy", noisy), "--ref", ref) == clean
    separators = files("separators", [HYPOTHESIS[0] + "\u2028", *HYPOTHESIS[1:]])
    assert scores(capsys, "--hyp", separators, "--ref", ref)["lines"] == 3


def test_eval_counts_empty_lines(files: Any, capsys: Capture) -> None:
    """E05: empty hypotheses were filtered out, or the reference scored in their place."""
    ref = files("ref", REFERENCE)
    blank = scores(capsys, "--hyp", files("blank", ["", "", ""]), "--ref", ref)
    assert blank["scores"][0]["value"] == 0.0
    half = scores(capsys, "--hyp", files("half", [*REFERENCE[:2], ""]), "--ref", ref)
    assert 0 < half["scores"][0]["value"] < 100


def test_eval_confidence_and_baseline(files: Any, capsys: Capture) -> None:
    """Intervals and the paired test are printed with the scores."""
    hyp, ref = files("hyp", REFERENCE * 10), files("ref", REFERENCE * 10)
    base = files("base", HYPOTHESIS * 10)
    arguments = ["--hyp", hyp, "--ref", ref, "--baseline", base, "--samples", "50"]
    found = scores(capsys, *arguments, "--confidence")
    for score in found["scores"]:  # two bare numbers were read as the ends of an interval
        assert set(score["ci"]) == {"mean", "half_width"} and score["ci"]["half_width"] >= 0
    assert [item["name"] for item in found["comparison"]] == ["BLEU", "chrF", "TER"]
    bleu = found["comparison"][0]
    assert bleu["system"] == pytest.approx(100.0) and bleu["delta"] > 0 and bleu["p_value"] < 0.05
    assert main(["eval", *arguments]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 6


def test_eval_of_a_model_is_translate_and_eval(
    random_run: Path, files: Any, capsys: Capture, tmp_path: Path
) -> None:
    """E10: the score of a model is that of its translations, with the same options; the language
    comes with the model; perplexity is that of the reference."""
    lines = [*SOURCES[:2], SOURCES[3]]
    source, ref = files("src", lines), files("ref", REFERENCE)
    assert translate(random_run, "--input", source, "--output", str(tmp_path / "hyp")) == 0
    apart = scores(capsys, "--hyp", str(tmp_path / "hyp"), "--ref", ref, "--lang", "de")
    kept = tmp_path / "kept"
    arguments = ["--model", str(random_run), "--source", source, "--ref", ref, "--device", "cpu"]
    found = scores(capsys, *arguments, "--output", str(kept))
    assert found["scores"] == apart["scores"] and found["lang"] == "de"
    assert kept.read_bytes() == (tmp_path / "hyp").read_bytes()
    assert found["decoding"]["beam"] == 2 and found["decoding"]["max_length"] == 12
    tokenizer = Tokenizer.load(random_run / "tokenizer.json")
    read = [ref for line, ref in zip(lines, REFERENCE, strict=True) if line.strip()]
    assert found["target_tokens"] == sum(len(tokenizer.encode(ref)) + 1 for ref in read)
    assert found["nll"] > 0 and found["perplexity"] > 1
    assert main(["eval", *arguments]) == 0
    assert "NLL = " in capsys.readouterr().out


def test_eval_of_a_model_checks_line_counts_first(
    random_run: Path, files: Any, capsys: Capture
) -> None:
    """E03: source and reference of unequal length are refused before anything is translated."""
    source, ref = files("src", SOURCES), files("ref", REFERENCE)
    assert main(["eval", "--model", str(random_run), "--source", source, "--ref", ref]) == 3
    assert capsys.readouterr().err == (
        f"error: {source} has 4 lines but {ref} has 3; line n of one must belong to line n of "
        "the other.\n"
    )


# ---- train ------------------------------------------------------------------------------------


def test_train_here_translate_there(
    files: Any, capsys: Capture, tmp_path: Path, monkeypatch: Any
) -> None:
    """C05, R25: relative paths are relative to the working directory; the run directory can be
    moved and translates from anywhere. A dry run leaves nothing behind."""
    for name, lines in {
        "t.en": ENGLISH,
        "t.de": GERMAN,
        "v.en": ENGLISH[:2],
        "v.de": GERMAN[:2],
    }.items():
        files(name, lines)
    config = files(
        "run.yaml",
        [
            "run_dir: run",
            "data:",
            "  source_lang: en",
            "  target_lang: de",
            "  train: {source: t.en, target: t.de}",
            "  valid: {source: v.en, target: v.de}",
            "  test: {source: v.en, target: v.de}",
            "tokenizer: {vocab_size: 280}",
            "model: {d_model: 16, d_ff: 32, num_heads: 2, encoder_layers: 1, decoder_layers: 1}",
            "optim: {warmup_steps: 2}",
            "train: {max_steps: 2, valid_every: 2, average: 0, batch_tokens: 100, device: cpu}",
            "decode: {beam: 1}",
        ],
    )
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--config", config, "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert "parameters" in out + err and "padding" in out + err
    assert not (tmp_path / "run").exists()
    assert main(["train", "--config", config, "--set", "train.max_steps=4"]) == 0
    out, err = capsys.readouterr()
    assert [line.split("|")[0] for line in out.splitlines()] == ["BLEU", "chrF2", "TER"]
    moved = tmp_path / "elsewhere" / "moved"
    moved.parent.mkdir()
    (tmp_path / "run").rename(moved)
    source = str(tmp_path / "v.en")
    monkeypatch.chdir(moved.parent)
    assert translate(Path("moved"), "--input", source) == 0
    assert capsys.readouterr().out.count("\n") == 2
    assert main(["encode", "--model", "moved", "--input", source]) == 0


def test_train_refuses_a_changed_model(files: Any, capsys: Capture, tmp_path: Path) -> None:
    """R16 at the command line: status 2, and the key is named."""
    lines = ["the house"] * 8
    paths = [files(name, lines) for name in ("a", "b")]
    corpus = f"{{source: {paths[0]}, target: {paths[1]}}}"
    config = files(
        "run.yaml",
        [
            f"run_dir: {tmp_path / 'run'}",
            f"data: {{source_lang: en, target_lang: de, train: {corpus}, valid: {corpus}}}",
            "tokenizer: {vocab_size: 270}",
            "model: {d_model: 16, d_ff: 32, num_heads: 2, encoder_layers: 1, decoder_layers: 1}",
            "train: {max_steps: 1, average: 0, batch_tokens: 100, device: cpu}",
        ],
    )
    assert main(["train", "--config", config]) == 0
    capsys.readouterr()
    assert main(["train", "--config", config, "--set", "model.d_model=32"]) == 2
    assert "model.d_model: 16 -> 32" in capsys.readouterr().err
