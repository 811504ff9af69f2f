"""A model directory or a configuration from a stranger: whatever its files hold, they are loaded or
refused in a sentence that names the file, at once; nothing runs, and nothing outside is touched.

`test_checkpoint`, `test_tokenizer` and `test_config` hold the single faults of each kind of file.
Here are values of all types in all places, files of absurd size, pipes, links and tensor headers.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import re
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from mttrain.checkpoint import load_model, load_train_state, read_index, resolve_model
from mttrain.cli import main
from mttrain.config import RunConfig, load_config, parse_config
from mttrain.corpus import file_sha256
from mttrain.errors import CheckpointError, ConfigError, MttrainError, TokenizerError
from mttrain.tokenizer import Tokenizer

Capture = pytest.CaptureFixture[str]
STEP = "step-00000001"
TERABYTE = 1 << 40
CONTROLS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")


@pytest.fixture
def run(tmp_path: Path, random_run: Path) -> Path:
    """A copy of a run, to be spoilt."""
    return Path(shutil.copytree(random_run, tmp_path / "run"))


@pytest.fixture(scope="module")
def shared_run(tmp_path_factory: pytest.TempPathFactory, random_run: Path) -> Path:
    """The same for the tests that make many cases; each of these writes its file anew."""
    return Path(shutil.copytree(random_run, tmp_path_factory.mktemp("hostile") / "run"))


def sign(checkpoint: Path) -> None:
    """Give meta.json the sums of the files as they are, as a forger does."""
    path = checkpoint / "meta.json"
    meta = json.loads(path.read_text(encoding="utf-8"))
    others = [file for file in checkpoint.iterdir() if file.name != "meta.json"]
    meta["files"] = {file.name: file_sha256(file) for file in others}
    meta.pop("content_sha256", None)  # as in checkpoints of older versions
    path.write_text(json.dumps(meta), encoding="utf-8")


@contextlib.contextmanager
def refused(kind: type[MttrainError], name: str) -> Iterator[None]:
    """The block must raise this error: one line, not long, with the name of the file."""
    with pytest.raises(kind) as caught:
        yield
    text = str(caught.value)
    assert name in text and "\n" not in text and len(text) < 600
    assert text.isprintable()


def told(arguments: list[str]) -> tuple[int, str]:
    """Exit status and stderr of a command; for tests whose cases share one `capsys`."""
    before = sys.stdout, sys.stderr
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2))
    sys.stdout, sys.stderr = out, err
    try:
        status = main(arguments)
    finally:
        sys.stdout, sys.stderr = before
    err.seek(0)
    return status, err.read()


class Touch:
    """Unpickling it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (os.mkdir, (str(self.path),))


# ---- values of every type in every place -------------------------------------------------------

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    | st.sampled_from([10**400, -(10**400), 2**63, 1e999, "", "../../x", "/etc/passwd", "a\nb"])
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
TOP = ["format", "step", "source_lang", "target_lang", "max_length", "versions", "threads"]
SECTIONS = ["model", "decode", "tokenizer_hash", "files"]
MODEL = [
    "d_model", "d_ff", "num_heads", "encoder_layers", "decoder_layers", "dropout", "activation",
    "norm", "positions", "max_positions", "tie", "layer_norm_eps", "source_vocab", "target_vocab",
    "more",
]  # fmt: skip
FIELDS = [(name,) for name in [*TOP, *SECTIONS]]
FIELDS += [("model", name) for name in MODEL]
FIELDS += [("decode", name) for name in ("beam", "length_penalty", "max_length", "more")]
FIELDS += [("tokenizer_hash", "source"), ("files", "model.safetensors"), ("files", "../../x")]


@settings(deadline=None, derandomize=True, max_examples=120)
@given(field=st.sampled_from(FIELDS), value=VALUES)
@example(("target_lang",), 5)
@example(("target_lang",), ["de"])
@example(("target_lang",), "d\ud800")
@example(("max_length",), 10**400)
@example(("max_length",), -3)
@example(("max_length",), True)
@example(("model", "d_model"), 10**6)
@example(("model", "d_model"), 10**15)
@example(("decode", "beam"), 10**30)
def test_any_value_in_meta_json(shared_run: Path, field: tuple[str, ...], value: object) -> None:
    """X06: a meta.json with a number for a language, a list for a count or a model of a terabyte
    either does no harm or is refused as a damaged checkpoint; no other error comes out of it."""
    checkpoint = shared_run / "checkpoints" / STEP
    path = checkpoint / "meta.json"
    good = path.read_bytes()
    content = json.loads(good)
    place = content
    for name in field[:-1]:
        place = place[name]
    place[field[-1]] = value
    text = shared_run / "text"
    text.write_text("the dog\n\n", encoding="utf-8")
    arguments = ["--model", str(shared_run), "--source", str(text), "--ref", str(text), "--json"]
    arguments += ["--beam", "2", "--max-length", "4", "--length-penalty", "1", "--device", "cpu"]
    try:
        path.write_text(json.dumps(content), encoding="utf-8")
        status, err = told(["eval", *arguments])
        assert status in (0, 4), err
        errors = [line for line in err.splitlines() if line.startswith("error: ")]
        assert len(errors) == (status == 4)
        assert status == 0 or (str(checkpoint) in err and len(errors[0]) < 600)
        assert not CONTROLS.search(err)
    finally:
        path.write_bytes(good)


@settings(deadline=None, derandomize=True, max_examples=120)
@given(
    field=st.sampled_from(
        [("metric",), ("last",), ("best",), ("scores",), ("scores", STEP), ("scores", STEP, "bleu")]
    ),
    value=VALUES,
)
@example(("scores", STEP, "bleu"), 10**400)
@example(("scores", STEP, "bleu"), 1e999)
@example(("scores", "a/b"), {})
@example(("last",), "..")
@example(("last",), "step-00000001\n")
def test_any_value_in_index_json(shared_run: Path, field: tuple[str, ...], value: object) -> None:
    """X06, R10: scores that are no numbers, or too large for one, names that are paths: refused, or
    without effect on which checkpoint is the best."""
    path = shared_run / "checkpoints" / "index.json"
    good = path.read_bytes()
    content = json.loads(good)
    place = content
    for name in field[:-1]:
        place = place[name]
    place[field[-1]] = value
    try:
        path.write_text(json.dumps(content), encoding="utf-8")
        try:
            index = read_index(shared_run)
            index.added("step-00000002", {"bleu": 1e6})
            assert index.ranked() in ([], [STEP])
            assert resolve_model(shared_run).parent == shared_run / "checkpoints"
        except CheckpointError as error:
            assert "\n" not in str(error) and len(str(error)) < 600
    finally:
        path.write_bytes(good)


TOKENIZER_FIELDS = [
    ("model",), ("model", "type"), ("model", "vocab"), ("model", "vocab", "<s>"),
    ("model", "vocab", "é"), ("model", "merges"), ("model", "merges", 0), ("model", "merges", 0, 1),
    ("pre_tokenizer",), ("pre_tokenizer", "type"), ("pre_tokenizer", "pretokenizers"),
    ("pre_tokenizer", "pretokenizers", 0), ("pre_tokenizer", "pretokenizers", 0, "pattern"),
    ("pre_tokenizer", "pretokenizers", 0, "pattern", "Regex"),
    ("pre_tokenizer", "pretokenizers", 0, "behavior"),
    ("pre_tokenizer", "pretokenizers", 0, "invert"),
    ("pre_tokenizer", "pretokenizers", 1, "use_regex"),
    ("pre_tokenizer", "pretokenizers", 1, "trim_offsets"), ("normalizer",), ("added_tokens",),
]  # fmt: skip


@settings(deadline=None, derandomize=True, max_examples=150)
@given(field=st.sampled_from(TOKENIZER_FIELDS), value=VALUES)
@example(("model", "vocab", "<s>"), 2.0)
@example(("model", "vocab", "a\nb"), 5)
@example(("pre_tokenizer", "pretokenizers", 0, "pattern", "Regex"), "(" * 10_000)
@example(("pre_tokenizer", "pretokenizers", 0, "pattern", "Regex"), "[\\x{d800}]")
def test_any_value_in_tokenizer_json(
    shared_run: Path, field: tuple[str | int, ...], value: object
) -> None:
    """X06, K08: the library that reads the vocabulary answers wrong types with panics and texts of
    many lines."""
    content: Any = json.loads((shared_run / "tokenizer.json").read_bytes())
    place = content
    for name in field[:-1]:
        place = place[name]
    place[field[-1]] = value
    path = shared_run / "other.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    try:
        loaded = Tokenizer.load(path)
        assert loaded.decode(loaded.encode("the dog")) == "the dog"
    except TokenizerError as error:
        text = str(error)
        assert text.startswith(f"{path}: ") and "\n" not in text and len(text) < 600


def whole_numbers() -> list[str]:
    """Dotted keys of the settings that are whole numbers."""
    schema = RunConfig.model_json_schema()
    keys = []
    for name, field in schema["properties"].items():
        section = schema["$defs"].get(field.get("$ref", "").split("/")[-1])
        inner = section["properties"] if section else {"": field}
        for key, setting in inner.items():
            if any(kind.get("type") == "integer" for kind in setting.get("anyOf", [setting])):
                keys.append(f"{name}.{key}".rstrip("."))
    return keys


@pytest.mark.parametrize("value", ["1e300", "-1e300", "1e999", ".nan", "1" * 400, "0x" + "f" * 40])
def test_numbers_beyond_all_bounds(value: str, tmp_path: Path) -> None:
    """C01: `max_steps: 1e300` passed as a whole number of 301 digits and ended, much later, in an
    error of some library."""
    path = tmp_path / "run.yaml"
    corpus = "{source: a, target: b}"
    data = f"{{source_lang: en, target_lang: de, train: {corpus}, valid: {corpus}}}"
    path.write_text(f"run_dir: r\ndata: {data}\ntrain: {{max_steps: 1}}\n", encoding="utf-8")
    load_config(path)
    keys = whole_numbers()
    assert len(keys) > 20
    for key in keys:
        with refused(ConfigError, f"--set {key}"):
            load_config(path, [f"{key}={value}"])


def test_repeated_keys_in_json(run: Path) -> None:
    """X06: of two entries with one name each reader takes another one: what was looked at is not
    what is loaded."""
    checkpoint = run / "checkpoints" / STEP
    for path, load in (
        (checkpoint / "meta.json", load_model),
        (run / "checkpoints" / "index.json", load_model),
        (checkpoint / "tokenizer.json", load_model),
    ):
        good = path.read_bytes()
        first = next(iter(json.loads(good)))
        path.write_bytes(b'{"' + first.encode() + b'": 7,' + good[1:])
        with refused(CheckpointError, path.name):
            load(run)
        path.write_bytes(good)
    load_model(run)


# ---- files of other kinds -----------------------------------------------------------------------


def test_pickles_are_opened_by_no_command(run: Path, tmp_path: Path, capsys: Capture) -> None:
    """X06: a pickle under the name of any file of a run, or as a configuration, is refused by every
    command, and what is inside does not run."""
    touched = tmp_path / "touched"
    data = pickle.dumps(Touch(touched))
    checkpoint = run / "checkpoints" / STEP
    text = tmp_path / "text"
    text.write_text("the dog\n", encoding="utf-8")
    model = ["--model", str(run)]
    commands = [
        ["translate", *model, "--input", str(text)],
        ["eval", *model, "--source", str(text), "--ref", str(text)],
    ]
    for path in (
        run / "checkpoints" / "index.json",
        *(checkpoint / name for name in ("meta.json", "tokenizer.json", "model.safetensors")),
    ):
        good = path.read_bytes()
        path.write_bytes(data)
        for arguments in commands:
            assert main(arguments) == 4
            assert path.name in capsys.readouterr().err.splitlines()[-1]
        path.write_bytes(good)
    for name in ("tokenizer.source.json", "tokenizer.target.json"):
        shutil.copy(checkpoint / "tokenizer.json", checkpoint / name)
    (checkpoint / "tokenizer.json").unlink()
    (checkpoint / "tokenizer.target.json").write_bytes(data)
    assert main(commands[0]) == 4
    assert "tokenizer.target.json" in capsys.readouterr().err
    config = tmp_path / "run.yaml"
    config.write_bytes(data)
    assert main(["train", "--config", str(config)]) == 2
    assert str(config) in capsys.readouterr().err
    assert main(["encode", "--model", str(config), "--input", str(text)]) == 3
    assert not touched.exists()


def giant(path: Path) -> None:
    """A terabyte that takes no room."""
    with path.open("wb") as file:
        file.truncate(TERABYTE)


def pipe(path: Path) -> None:
    """A named pipe without a writer: to open it is to wait."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def endless(path: Path) -> None:
    """A link to a device that never ends."""
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def nothing(path: Path) -> None:
    """A file of 0 bytes."""
    path.write_bytes(b"")


@pytest.mark.parametrize("make", [giant, pipe, endless, nothing])
@pytest.mark.parametrize("name", ["meta.json", "index.json", "tokenizer.json"])
def test_files_that_are_no_files(
    make: Callable[[Path], None], name: str, run: Path, capsys: Capture
) -> None:
    """X06: a terabyte of zeros was read into memory until there was none; a named pipe in the place
    of a file was waited for, for ever."""
    folder = run / "checkpoints"
    path = folder / name if name == "index.json" else folder / STEP / name
    make(path)
    with pytest.raises(CheckpointError) as caught:
        load_model(run)
    text = str(caught.value)
    assert (name in text or STEP in text) and "\n" not in text and len(text) < 600
    assert main(["translate", "--model", str(run)]) == 4
    capsys.readouterr()
    if name == "tokenizer.json":
        with refused(TokenizerError, name):
            Tokenizer.load(path)
        if make is giant:
            assert main(["encode", "--model", str(path)]) == 3


@pytest.mark.parametrize("make", [giant, endless, nothing])
def test_configurations_that_are_no_files(make: Callable[[Path], None], tmp_path: Path) -> None:
    """C03: a configuration of a terabyte was read into memory."""
    path = tmp_path / "run.yaml"
    make(path)
    with refused(ConfigError, str(path)):
        load_config(path)


LAUGHS = "a0: &a0 [lol, lol]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30)
)


@pytest.mark.parametrize(
    "text",
    [
        LAUGHS,
        "a: !!python/object/apply:os.mkdir [touched]\n",
        "!!python/object/new:os.mkdir {args: [touched]}\n",
        "? !!python/name:os.mkdir\n: 1\n",
        "{a: " * 5000,
        "- " * 5000,
        "a:\n" + "".join(f"{' ' * n}b:\n" for n in range(1, 1500)),
        "<<: [a, b]\n",
        "a: " + "x" * 500_000,
        "%YAML 9.9\n---\na: 1\n",
        "a: |\n" + "  x\n" * 10_000,
    ],
    ids=[
        "laughs", "apply", "new", "name", "braces", "dashes", "indents", "merge", "long", "version",
        "block",
    ],
)  # fmt: skip
def test_hostile_yaml(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """X06, C03: aliases that grow to gigabytes, tags that make objects, thousands of levels and
    giant words are refused with the file's name, as --set values too."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config("run.yaml")
    lines = str(caught.value).split("\n")
    assert all(line.startswith("run.yaml") and len(line) < 600 for line in lines)
    path.write_text("run_dir: x\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config("run.yaml", [f"model={text}", f"model.d_model={text}"])
    assert all(len(line) < 600 for line in str(caught.value).split("\n"))
    assert main(["train", "--config", "run.yaml", "--set", f"optim.lr={text}"]) == 2
    assert os.listdir() == ["run.yaml"]
    capsys.readouterr()


# ---- links --------------------------------------------------------------------------------------


def test_links_out_of_the_run(run: Path, tmp_path: Path, random_run: Path) -> None:
    """X06: an index that names a link reads, through it, a folder somewhere else. A checkpoint that
    is named by its own path may be a link, and files may be: their sums decide."""
    checkpoint, outside = run / "checkpoints" / STEP, tmp_path / "outside"
    shutil.move(checkpoint, outside)
    checkpoint.symlink_to(outside)
    before = {path.name: path.read_bytes() for path in outside.iterdir()}
    with refused(CheckpointError, STEP):
        load_model(run)
    load_model(checkpoint)
    assert {path.name: path.read_bytes() for path in outside.iterdir()} == before
    checkpoint.unlink()
    shutil.copytree(outside, checkpoint)
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "model.safetensors").symlink_to(outside / "model.safetensors")
    load_model(run)
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "model.safetensors").symlink_to(outside / "meta.json")
    with refused(CheckpointError, "model.safetensors"):
        load_model(run)
    (checkpoint / "tokenizer.json").unlink()
    (checkpoint / "tokenizer.json").symlink_to("/etc/passwd")
    with refused(CheckpointError, "model.safetensors"):
        load_model(run)


def test_names_in_meta_json_are_not_followed(run: Path, tmp_path: Path) -> None:
    """X06: the table of sums may list what it likes: only the files that a checkpoint has are
    opened. The pipe would be waited for."""
    pipe(tmp_path / "pipe")
    checkpoint = run / "checkpoints" / STEP
    path = checkpoint / "meta.json"
    meta = json.loads(path.read_text(encoding="utf-8"))
    meta["files"] |= {str(tmp_path / "pipe"): "0", "../../../pipe": "0", "..": "0", "": "0"}
    path.write_text(json.dumps(meta), encoding="utf-8")
    load_model(run)


# ---- tensors ------------------------------------------------------------------------------------


def tensors(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file: 8 bytes of length, a JSON header, the numbers."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


TENSORS = {
    "empty": b"",
    "seven bytes": b"\0" * 7,
    "no header": struct.pack("<Q", 0),
    "header of exabytes": tensors(b"{}", length=2**63),
    "header beyond the end": tensors(b"{}", length=3),
    "no JSON": tensors(b"\x80\x04}"),
    "a list": tensors([]),
    "deep": tensors(b"[" * 100_000),
    "deep objects": tensors(b'{"a":' * 50_000),
    "overlap": tensors({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, b"\0" * 12),
    "gap": tensors({"a": entry("F32", [1], 4, 8)}, b"\0" * 8),
    "backwards": tensors({"a": entry("F32", [2], 8, 0)}, b"\0" * 8),
    "beyond the end": tensors({"a": entry("F32", [2**38], 0, 2**40)}, b"\0" * 8),
    "beyond 64 bits": tensors({"a": entry("F32", [2], 0, 2**64)}, b"\0" * 8),
    "negative": tensors({"a": entry("F32", [2], -8, 0)}, b"\0" * 8),
    "negative shape": tensors({"a": entry("F32", [-2], 0, 8)}, b"\0" * 8),
    "shape overflows": tensors({"a": entry("F32", [2**32, 2**32], 0, 0)}),
    "shape is zero": tensors({"a": entry("F32", [0, 2**62], 0, 0)}),
    "other size": tensors({"a": entry("F32", [3], 0, 8)}, b"\0" * 8),
    "rest": tensors({"a": entry("F32", [2], 0, 8)}, b"\0" * 99),
    "no dtype": tensors({"a": entry("Q9", [2], 0, 8)}, b"\0" * 8),
    "metadata": tensors({"__metadata__": {"a": 5}, "a": entry("F32", [2], 0, 8)}, b"\0" * 8),
    "many dimensions": tensors({"a": entry("F32", [1] * 5000, 0, 4)}, b"\0" * 4),
    "odd name": tensors({"a\n\x1b[2J": entry("F32", [2], 0, 8)}, b"\0" * 8),
    **{
        f"type {dtype}": tensors({"a": entry(dtype, [8], 0, size)}, b"\0" * size)
        for dtype, size in (
            ("BOOL", 8), ("F4", 4), ("F6_E2M3", 6), ("F8_E5M2", 8), ("F8_E4M3", 8), ("F8_E8M0", 8),
            ("U16", 16), ("U64", 64), ("C64", 64), ("BF16", 16), ("I8", 8),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("name", TENSORS)
def test_hostile_tensor_files(name: str, run: Path) -> None:
    """X06, X04: headers that lie about sizes, places and types of numbers are refused though the
    sums are right; so are numbers of types that no model here has."""
    checkpoint = run / "checkpoints" / STEP
    (checkpoint / "model.safetensors").write_bytes(TENSORS[name])
    sign(checkpoint)
    with refused(CheckpointError, "model.safetensors"):
        load_model(run)
    shutil.copy(checkpoint / "tokenizer.json", checkpoint / "training.json")
    (checkpoint / "training.safetensors").write_bytes(TENSORS[name])
    sign(checkpoint)
    with contextlib.suppress(CheckpointError):
        load_train_state(checkpoint)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
def test_weights_that_are_no_numbers(
    value: float, run: Path, tmp_path: Path, capsys: Capture
) -> None:
    """S19: with weights that are NaN or overflow, each line still gives a line and valid JSON."""
    checkpoint = run / "checkpoints" / STEP
    path = checkpoint / "model.safetensors"
    weights = {name: torch.full_like(tensor, value) for name, tensor in load_file(path).items()}
    save_file(weights, path)
    sign(checkpoint)
    text = tmp_path / "text"
    text.write_text("the dog\n\na\n", encoding="utf-8")

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in the output")

    for options in (["--beam", "1"], ["--beam", "3", "--nbest", "2"], ["--sample"]):
        arguments = ["--model", str(run), "--input", str(text), "--max-length", "5", *options]
        assert main(["translate", *arguments, "--format", "jsonl"]) == 0
        rows = capsys.readouterr().out.split("\n")[:-1]
        assert len(rows) == 3
        for row in rows:
            json.loads(row, parse_constant=refuse)
    arguments = ["--model", str(run), "--source", str(text), "--ref", str(text), "--json"]
    assert main(["eval", *arguments, "--max-length", "5"]) == 0
    json.loads(capsys.readouterr().out, parse_constant=refuse)


def test_a_width_that_no_model_has(random_run: Path) -> None:
    """X06: a d_model of millions asked for tens of gigabytes of positions before it was compared
    with the tensors."""
    data = {
        "run_dir": "r",
        "data": {
            "source_lang": "en", "target_lang": "de",
            "train": {"source": "a", "target": "b"}, "valid": {"source": "a", "target": "b"},
        },
        "train": {"max_steps": 1},
        "model": {"d_model": 10**7, "num_heads": 1},
    }  # fmt: skip
    with refused(ConfigError, "model.d_model"):
        parse_config(data)
