"""Settings: reading, checking and writing them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from mttrain.config import (
    CorpusConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
    changed_keys,
    dump_config,
    load_config,
    parse_config,
)
from mttrain.errors import ConfigError
from mttrain.yamlio import override, plain_tree

MINIMAL = """\
run_dir: runs/x
data:
  source_lang: en
  target_lang: de
  train: {source: a.en, target: a.de}
  valid: {source: v.en, target: v.de}
train:
  max_steps: 10
"""


def write(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "run.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def problems(tmp_path: Path, text: str | bytes, *overrides: str) -> list[str]:
    """The lines of the error for this text, without the directory of the file."""
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text), overrides)
    return [line.replace(f"{tmp_path}/", "") for line in str(caught.value).split("\n")]


def load(tmp_path: Path, text: str | bytes, *overrides: str) -> RunConfig:
    return load_config(write(tmp_path, text), overrides)


def test_minimal_file_has_the_documented_defaults(tmp_path: Path) -> None:
    """A default that drifts from the documentation changes every run that relies on it."""
    config = load(tmp_path, MINIMAL)
    assert config.data.train == [CorpusConfig(source="a.en", target="a.de")]
    assert (config.seed, config.threads, config.data.max_length) == (1, None, 256)
    assert (config.optim.lr, config.optim.betas, config.optim.eps) == (5e-3, (0.9, 0.98), 1e-9)
    assert (config.train.batch_tokens, config.train.batch_size) == (4096, None)
    assert (config.train.average, config.train.keep_last, config.decode.beam) == (10, 10, 5)


@pytest.mark.parametrize(
    ("written", "value"),
    [("1e-4", 1e-4), ("1E-4", 1e-4), ("1.0e-4", 1e-4), (".1", 0.1), ("4e-3", 4e-3), ("1", 1.0)],
)
def test_numbers_with_exponents_are_numbers(tmp_path: Path, written: str, value: float) -> None:
    """C01: PyYAML reads `lr: 1e-4` as text; the optimiser then compares a string with a number."""
    assert load(tmp_path, f"{MINIMAL}optim: {{lr: {written}}}").optim.lr == value
    assert load(tmp_path, MINIMAL, f"optim.lr={written}").optim.lr == value


def test_whole_numbers_may_have_an_exponent(tmp_path: Path) -> None:
    """C01: `warmup: 4e3` is 4000 updates, an integer and not a float or a string."""
    warmup = load(tmp_path, MINIMAL, "optim.warmup_steps=4e3").optim.warmup_steps
    assert (warmup, type(warmup)) == (4000, int)
    assert problems(tmp_path, MINIMAL, "optim.warmup_steps=4.5e0") == [
        "--set optim.warmup_steps: wants a whole number, got 4.5e0"
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('optim: {lr: "0.1"}', 'optim.lr: wants a number, got "0.1"; remove the quotes'),
        ("optim: {lr: 0,1}", "optim.lr: wants a number, got"),
        ("seed: 010", "seed: wants a whole number, got 010; write 10"),
        ("seed: 0x10", "seed: wants a whole number, got 0x10"),
        ("seed: 4_096", "seed: wants a whole number, got 4_096; write 4096"),
        ("seed: 1:30", "seed: wants a whole number, got 1:30"),
        ("seed: yes", "seed: wants a whole number, got yes"),
        ("seed: -1", "seed: must be at least 0, got -1"),
        ("seed: 99999999999999999999999", "seed: wants a whole number"),
        ("seed: [1]", "seed: wants a whole number, got a list"),
        ("seed: {a: 1}", "seed: wants a whole number, got a section"),
        ("seed: ", "seed: wants a whole number, got nothing (null)"),
        ("optim: {eps: .nan}", "optim.eps: must be a finite number, got .nan"),
        ("optim: {eps: 1e999}", "optim.eps: must be a finite number, got 1e999"),
        ("model: {dropout: 1.0}", "model.dropout: must be less than 1, got 1.0"),
        ("tokenizer: {shared: 1}", "tokenizer.shared: wants true or false, got 1"),
        ("model: {norm: prre}", "model.norm: must be post or pre, got prre (did you mean 'pre'?)"),
        ("optim: {betas: [0.9, 2]}", "optim.betas[1]: must be less than 1, got 2"),
        ("optim: {betas: 0.9}", "optim.betas: wants a list, got 0.9"),
        ("decode: 3", "decode: wants a section of key: value lines, got 3"),
    ],
)
def test_wrong_values_name_line_key_value_and_type(tmp_path: Path, line: str, message: str) -> None:
    """C01: octal, base 60, grouped digits and quoted numbers were taken as other numbers."""
    text = MINIMAL + line + "\n"
    if line.startswith("optim: {lr: 0,1}"):
        text = MINIMAL + "optim:\n  lr: 0,1\n"
    (found,) = problems(tmp_path, text)
    assert found.startswith(f"run.yaml:{text.count(chr(10))}: {message}")


@pytest.mark.parametrize(
    "word", ["no", "NO", "No", "on", "off", "yes", "y", "n", "true", "null", "~", "1.0", "10"]
)
def test_yaml_words_where_text_is_due_are_refused(tmp_path: Path, word: str) -> None:
    """C02: `source_lang: no` (Norwegian) became False; quoted it is text."""
    text = MINIMAL.replace("source_lang: en", f"source_lang: {word}")
    (found,) = problems(tmp_path, text)
    assert found.startswith("run.yaml:3: data.source_lang: wants text")
    assert found.endswith(f'quote it: "{word}"')
    quoted = MINIMAL.replace("source_lang: en", f'source_lang: "{word}"')
    assert load(tmp_path, quoted).data.source_lang == word
    again = load(tmp_path, dump_config(load(tmp_path, quoted)))
    assert again.data.source_lang == word


@pytest.mark.parametrize("name", ["010", "1:30", "4_096", "2020-01-01", "0x1F", "é", "a b"])
def test_text_stays_as_written(tmp_path: Path, name: str) -> None:
    """C02: file names that look like octal numbers, times or dates are plain text."""
    assert load(tmp_path, MINIMAL.replace("runs/x", name)).run_dir == name


@pytest.mark.parametrize(("word", "value"), [("yes", True), ("no", False), ("False", False)])
def test_booleans_where_booleans_are_due(tmp_path: Path, word: str, value: bool) -> None:
    config = load(tmp_path, MINIMAL, f"tokenizer.shared={word}", "model.tie=target")
    assert config.tokenizer.shared is value


@pytest.mark.parametrize(
    ("line", "suggestion"),
    [
        ("optim: {learning_rte: 1.0}", "optim.learning_rte: unknown key (did you mean 'lr'?)"),
        ("optim: {label-smoothing: 0.1}", "unknown key (did you mean 'label_smoothing'?)"),
        ("model: {label_smoothing: 0.1}", "unknown key (did you mean 'optim.label_smoothing'?)"),
        ("optim: {Lr: 0.1}", "unknown key (did you mean 'lr'?)"),
        ("lr: 0.1", "lr: unknown key (did you mean 'optim.lr'?)"),
        ("optim.lr: 0.1", "optim.lr: unknown key; write lr inside the section optim"),
        ("optimizer: {lr: 0.1}", "optimizer: unknown key (did you mean 'optim'?)"),
        ("decode: {beam_size: 4}", "decode.beam_size: unknown key (did you mean 'beam'?)"),
        (
            "model: {max_length: 4}",
            "unknown key (did you mean 'data.max_length' or 'decode.max_length'?)",
        ),
        ("decode: {zzz: 4}", "unknown key; the keys here are beam, length_penalty, max_length"),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest(
    tmp_path: Path, line: str, suggestion: str
) -> None:
    """C03: a misspelt or misplaced key was dropped and the run used the default."""
    (found,) = problems(tmp_path, MINIMAL + line)
    assert found.startswith("run.yaml:9: ")
    assert suggestion in found


def test_unknown_key_in_a_list_of_corpora(tmp_path: Path) -> None:
    """The index of the corpus is part of the key, and the line is that of the key."""
    text = MINIMAL.replace(
        "  train: {source: a.en, target: a.de}",
        "  train:\n    - {source: a, target: b}\n    - source: c\n      wieght: 2\n      target: d",
    )
    assert problems(tmp_path, text) == [
        "run.yaml:8: data.train[1].wieght: unknown key (did you mean 'weight'?)"
    ]
    single = MINIMAL.replace("target: a.de", "target: a.de, wieght: 2")
    assert problems(tmp_path, single) == [
        "run.yaml:5: data.train.wieght: unknown key (did you mean 'weight'?)"
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "run.yaml: is empty; a configuration needs run_dir, data and train"),
        ("# nothing\n", "run.yaml: is empty"),
        ("- a\n- b\n", "run.yaml:1: holds a list, not key: value lines"),
        ("word", "run.yaml:1: holds one word"),
        ("run_dir: x\ndata:\n\tsource: y\n", "run.yaml:3:1: not readable as YAML: indented with a"),
        ("run_dir: x\ndata: {a: [1, 2}\n", "run.yaml:2:16: not readable as YAML"),
        ("run_dir: x\ndata: b: c\n", "run.yaml:2:8: not readable as YAML"),
        ("a: 1\n---\nb: 2\n", "run.yaml:2:1: not readable as YAML"),
        ("a: &x 1\nb: *x\n", "run.yaml:1:4: not readable as YAML: anchors"),
        ("a: *x\n", "run.yaml:1:4: not readable as YAML: anchors (&) and aliases"),
        ("a: !!python/object:os.system {}\n", "run.yaml:1:4: not readable as YAML: tags"),
        ("? [a]\n: 1\n", "run.yaml:1:3: not readable as YAML: a key must be one word"),
        ("a: 1\nb: \x07\n", "run.yaml:2: character U+0007 is not allowed in YAML"),
        (b"a: 1\nb: \xff\n", "run.yaml:2: byte 8 is not UTF-8"),
        ("[" * 3000, "run.yaml:1: nested too deeply"),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, text: str | bytes, message: str) -> None:
    """C03, X06: parse errors are one line with line and column, never a traceback; no YAML tag
    makes an object."""
    (found,) = problems(tmp_path, text)
    assert found.startswith(message)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """A missing file or a directory is a usage error of one line."""
    with pytest.raises(ConfigError, match=r"nowhere.yaml: no such file$"):
        load_config(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_config(tmp_path)


def test_byte_order_mark_and_crlf_are_accepted(tmp_path: Path) -> None:
    """Files saved by Windows editors: the mark became part of the first key."""
    plain = load(tmp_path, MINIMAL)
    windows = b"\xef\xbb\xbf" + MINIMAL.replace("\n", "\r\n").encode()
    assert load(tmp_path, windows) == plain


def test_repeated_keys_are_refused_with_both_lines(tmp_path: Path) -> None:
    """C01: of two `lr` lines the last won without a word."""
    text = MINIMAL + "optim:\n  lr: 1e-3\n  eps: 1e-8\n  lr: 2e-3\nseed: 1\nseed: 1\n"
    assert problems(tmp_path, text) == [
        "run.yaml:12: optim.lr: is given twice (first in line 10)",
        "run.yaml:14: seed: is given twice (first in line 13)",
    ]


def test_all_problems_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    """One error per attempt made users start a run again and again; checks between fields are
    reported beside wrong fields, but not those that look at a wrong field."""
    text = """\
seed: x
data:
  source_lang: en
  train: {source: a, target: b}
  valid: {source: a, target: b, weight: 2}
tokenizer: {shared: false}
model: {d_model: 6, d_ff: -1, positions: learned}
optim: {schedule: cosine, min_lr: x}
train: {max_epochs: 1, keep_last: 3, batch_size: x}
"""
    assert problems(tmp_path, text, "decode.beam=0", "decode.x={", "nonsense", "seed.x=1") == [
        "run.yaml:1: run_dir: is required",
        "run.yaml:1: seed: wants a whole number, got x",
        "run.yaml:2: data.target_lang: is required",
        "run.yaml:6: model.tie: all needs one vocabulary; use tie: target, or "
        "tokenizer.shared: true",
        "run.yaml:7: model.d_ff: must be at least 1, got -1",
        "run.yaml:7: model.d_model: 6 is not divisible by num_heads (4)",
        "run.yaml:7: model.max_positions: is required with positions: learned",
        "run.yaml:8: optim.min_lr: wants a number, got x",
        "run.yaml:8: optim.schedule: cosine needs train.max_steps, where it ends",
        "run.yaml:9: train.batch_size: wants a whole number, got x",
        "run.yaml:9: train.average: 10 is above keep_last (3); only kept checkpoints can be "
        "averaged",
        "--set decode.x: not readable as YAML: expected the node content, but found '<stream end>'",
        "--set nonsense: write --set section.key=value, for example --set train.max_steps=1000",
        "--set seed.x: seed has no item x",
        "--set decode.beam: must be at least 1, got 0",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["model.max_positions=64"], "max_positions: has no effect with positions: sinusoidal"),
        (["model.positions=learned"], "max_positions: is required with positions: learned"),
        (["tokenizer.level=character", "tokenizer.dropout=0.1"], "needs level: subword"),
        (
            ["model.positions=learned", "model.max_positions=64"],
            "data.max_length: 256 is above model.max_positions (64)",
        ),
        (
            ["model.positions=learned", "model.max_positions=300", "decode.max_length=400"],
            "decode.max_length: 400 is above model.max_positions (300)",
        ),
        (["model.num_heads=3"], "d_model: 128 is not divisible by num_heads (3)"),
        (["tokenizer.source_path=x"], "source_path: has no effect with shared: true; use path"),
        (
            ["tokenizer.shared=false", "model.tie=none", "tokenizer.path=x"],
            "path: has no effect with shared: false",
        ),
        (
            ["tokenizer.shared=false", "model.tie=none", "tokenizer.source_path=x"],
            "source_path: is given alone",
        ),
        (["tokenizer.path=x", "tokenizer.vocab_size=300"], "vocab_size: has no effect when an"),
        (["tokenizer.vocab_size=20"], "tokenizer.vocab_size: must be at least 260, got 20"),  # K04
        (["tokenizer.shared=false"], "model.tie: all needs one vocabulary"),
        (["optim.schedule=constant", "optim.min_lr=1e-5"], "min_lr: has no effect"),
        (["optim.min_lr=1"], "min_lr: 1.0 is above lr (0.005)"),
        (["optim.schedule=linear"], "warmup_steps: 1000 leaves no step of train.max_steps (10)"),
        (["optim.schedule=linear", "train={max_epochs: 1}"], "schedule: linear needs"),
        (["train.average=20"], "average: 20 is above keep_last (10)"),
        (["train.average=1"], "average: one checkpoint is no mean; give 2 or more, or 0"),
        (["train.average=0", "train.average_of=best"], "average_of: has no effect with average: 0"),
        (["train.ema=1e-4"], "train.ema: 0.0001 keeps hardly anything"),
        (["optim.rdrop=5", "model.dropout=0"], "optim.rdrop: has no effect without dropout"),
        (["train.max_steps=null"], "max_steps: give at least one of max_steps, max_epochs"),
        (["train.batch_tokens=null"], "batch_tokens: give either batch_tokens or batch_size"),
        (["train.batch_size=8", "train.batch_tokens=8"], "batch_size: give either batch_size or"),
        (["train.max_time=1:30"], "max_time: wants a time such as 90m"),
        (["train.max_time=0s"], "max_time: wants a time such as 90m"),
        (["train.tf32=true", "train.precision=bf16"], "tf32: has no effect with precision: bf16"),
        (["train.tf32=true", "train.device=cpu"], "tf32: has no effect with device: cpu"),
        (["train.parallel=fsdp", "train.batch_tokens=auto"], "batch_tokens: auto cannot tell"),
        (["train.compile=true", "train.device=mps"], "compile: true is not for device: mps"),
        (["train.parallel=fsdp", "train.device=mps"], "parallel: fsdp is not for device: mps"),
        (["train.parallel=zero"], "parallel: must be ddp or fsdp, got zero"),
        (["train.device=gpu"], "device: must be auto, cpu, cuda, cuda:N or mps"),
        (["data.valid.weight=2"], "valid.weight: only training corpora have a weight"),
        (["data.train=[]"], "data.train: List should have at least 1 item"),
        (['data.source_lang=""'], "source_lang: must not be empty"),
        (['run_dir="a\\0b"'], "run_dir: holds a character that no file name"),
    ],
)
def test_settings_that_contradict_or_have_no_effect(
    tmp_path: Path, changes: list[str], message: str
) -> None:
    """A setting that does nothing is noticed hours later on the loss curve, if ever."""
    (found,) = problems(tmp_path, MINIMAL, *changes)
    assert message in found


@pytest.mark.parametrize("value", ["0", "-1", "0.0", "-0.5"])
def test_clip_norm_zero_is_refused_with_the_way_to_switch_it_off(
    tmp_path: Path, value: str
) -> None:
    """R24: clip norm 0 scaled every gradient to zero and nothing learned."""
    (found,) = problems(tmp_path, MINIMAL, f"optim.clip_norm={value}")
    assert "optim.clip_norm: must be greater than 0" in found
    assert "use null to switch clipping off" in found
    assert load(tmp_path, MINIMAL, "optim.clip_norm=null").optim.clip_norm is None


def test_batch_size_replaces_batch_tokens(tmp_path: Path) -> None:
    """Giving the one must not clash with the default of the other, nor after a round trip."""
    config = load(tmp_path, MINIMAL, "train.batch_size=8")
    assert (config.train.batch_size, config.train.batch_tokens) == (8, None)
    assert load(tmp_path, dump_config(config)) == config


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("90m", 5400), ("1h30m", 5400), ("45s", 45), ("2d", 172800), ("600", 600), ("6e2", 600)],
)
def test_max_time(tmp_path: Path, written: str, seconds: float) -> None:
    assert load(tmp_path, MINIMAL, f"train.max_time={written}").train.max_seconds == seconds


def test_overrides_reach_every_depth(tmp_path: Path) -> None:
    """Precedence is defaults < YAML < --set, also in lists and absent sections."""
    text = MINIMAL.replace(
        "{source: a.en, target: a.de}", "[{source: a, target: b}, {source: c, target: d}]"
    )
    config = load(
        tmp_path, text, "data.train.1.weight=2", "decode.beam=3", "decode.beam=4", "seed = 7",
        "data.test={source: t, target: u}", "run_dir=a=b",
    )  # fmt: skip
    assert [corpus.weight for corpus in config.data.train] == [1.0, 2.0]
    assert (config.decode.beam, config.seed, config.run_dir) == (4, 7, "a=b")
    assert config.data.test == CorpusConfig(source="t", target="u")
    assert problems(tmp_path, text, "data.train.5.weight=2", "data.train.x=2", "seed") == [
        "--set data.train.5.weight: data.train has no item 5",
        "--set data.train.x: data.train has no item x",
        "--set seed: write --set section.key=value, for example --set train.max_steps=1000",
    ]


def test_one_corpus_has_the_index_of_a_list(tmp_path: Path) -> None:
    """What config.yaml of a run holds as a list may stand alone in the user's file."""
    config = load(tmp_path, MINIMAL, "data.train.0.weight=2", "data.train.0.source=x.en")
    assert [(c.source, c.weight) for c in config.data.train] == [("x.en", 2.0)]
    assert problems(tmp_path, MINIMAL, "data.train.1.weight=2") != []


def test_override_mends_what_the_file_has_wrong(tmp_path: Path) -> None:
    """An overridden value must not be reported, nor be reported at the line of the file."""
    text = MINIMAL + "optim: {lr: x}\n"
    assert load(tmp_path, text, "optim.lr=1e-3").optim.lr == 1e-3
    assert problems(tmp_path, text, "optim.lr=y") == ["--set optim.lr: wants a number, got y"]


def test_absent_and_empty_sections_are_the_same(tmp_path: Path) -> None:
    """A section whose lines are all commented out is null to YAML."""
    assert load(tmp_path, MINIMAL + "model:\n  # d_model: 3\n") == load(tmp_path, MINIMAL)


def test_sections_check_themselves_in_python() -> None:
    """Parts built without a file must not be able to hold an illegal state."""
    with pytest.raises(ValidationError, match="128 is not divisible by num_heads"):
        ModelConfig(num_heads=3)
    with pytest.raises(ValidationError, match="give at least one of max_steps"):
        TrainConfig()
    with pytest.raises(ValidationError, match="frozen"):
        ModelConfig().d_model = 3  # type: ignore[misc]
    assert ModelConfig(d_model=129, num_heads=3).d_model == 129  # odd sizes are fine (M11)


def test_parse_config_names_its_origin() -> None:
    """Settings inside a damaged meta.json give the same kind of error as a file."""
    data: dict[str, Any] = yaml.safe_load(MINIMAL)
    assert parse_config(data).run_dir == "runs/x"
    data["model"] = {"d_model": "x"}
    data["data"]["train"] = [{"source": "a", "target": 1}]
    with pytest.raises(ConfigError) as caught:
        parse_config(data, name="meta.json")
    assert str(caught.value).split("\n") == [
        "meta.json: data.train[0].target: wants text, got 1",
        'meta.json: model.d_model: wants a whole number, got "x"',
    ]


TEXT = st.text(min_size=1).filter(lambda t: t.strip() and "\0" not in t)


@settings(deadline=None)
@given(
    run_dir=TEXT,
    lr=st.floats(min_value=1e-300, max_value=1e300),
    betas=st.tuples(*[st.floats(min_value=0, max_value=1, exclude_max=True)] * 2),
    weight=st.floats(min_value=1e-9, max_value=1e9),
    seed=st.integers(0, 2**63 - 1),
)
def test_dump_and_load_give_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    run_dir: str,
    lr: float,
    betas: tuple[float, float],
    weight: float,
    seed: int,
) -> None:
    """Written text such as "no", "1e-4" or U+0085 came back as another type or another text."""
    data: dict[str, Any] = yaml.safe_load(MINIMAL)
    data["data"]["train"] = {"source": run_dir, "target": run_dir, "weight": weight}
    config = parse_config(data | {"run_dir": run_dir, "seed": seed, "optim": {
        "lr": lr, "betas": list(betas), "min_lr": min(lr, 1e-7)}})  # fmt: skip
    path = tmp_path_factory.getbasetemp() / "round.yaml"
    path.write_text(dump_config(config), encoding="utf-8", newline="")
    assert load_config(path) == config
    assert parse_config(json.loads(json.dumps(config.model_dump(mode="json")))) == config


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
KEYS = ["run_dir", "data", "data.train", "data.valid", "tokenizer", "model", "optim", "train"]


@settings(deadline=None)
@given(changes=st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from(
    ["", ".weight", ".positions", ".max_positions", ".shared", ".path", ".schedule", ".betas"]
), JSON), min_size=1, max_size=4))  # fmt: skip
def test_no_values_end_in_another_error(changes: list[tuple[str, str, Any]]) -> None:
    """A check between settings met a section that was no section, and ended in a traceback."""
    data: dict[str, Any] = yaml.safe_load(MINIMAL)
    for key, field, value in changes:
        place: Any = data
        *above, last = (key + field).split(".")
        for part in above:
            if isinstance(place, dict):
                place = place.setdefault(part, {})
        if isinstance(place, dict):
            place[last] = value
    try:
        assert parse_config(data).run_dir
    except ConfigError as error:
        assert all(line.startswith("config: ") for line in str(error).split("\n"))


def test_a_key_with_a_line_end_stays_on_its_line() -> None:
    """One problem is one line of the message, whatever the key holds."""
    data: dict[str, Any] = yaml.safe_load(MINIMAL)
    data["train"]["\n"] = 1
    with pytest.raises(ConfigError, match=r"^config: train\.'\\n': unknown key") as caught:
        parse_config(data)
    assert "\n" not in str(caught.value)


@settings(deadline=None)
@given(st.text(alphabet="abc:-#&*!%@[]{},'\"| \n\t\x00\u2028~?<>10.e_", max_size=30))
def test_no_text_ends_in_another_error(text: str) -> None:
    """PyYAML's scanner has errors of several kinds; all are the user's to mend."""
    tree = plain_tree({"a": 1}, "x")
    override(tree, f"a={text}")
    assert len(tree.faults) <= 3
    assert all("\n" not in fault.message for fault in tree.faults)


def test_changed_keys_names_every_difference() -> None:
    """R16: a resumed run must be able to name each changed setting with both values."""
    data: dict[str, Any] = yaml.safe_load(MINIMAL)
    old = parse_config(data)
    assert changed_keys(old, old) == {}
    data["optim"] = {"betas": [0.9, 0.999]}
    data["data"]["train"] = [data["data"]["train"], {"source": "b.en", "target": "b.de"}]
    data["data"]["test"] = {"source": "t", "target": "u"}
    assert changed_keys(old, parse_config(data)) == {
        "optim.betas": ([0.9, 0.98], [0.9, 0.999]),
        "data.train[1].source": (None, "b.en"),
        "data.train[1].target": (None, "b.de"),
        "data.train[1].weight": (None, 1.0),
        "data.test.source": (None, "t"),
        "data.test.target": (None, "u"),
        "data.test.weight": (None, 1.0),
    }


def test_a_file_name_for_a_corpus_is_told_what_is_wanted(tmp_path: Path) -> None:
    """`train: FILE` was answered with "wants a list"."""
    data = "data: {source_lang: en, target_lang: de, valid: {source: a, target: b}, train: a.en}"
    (found,) = problems(tmp_path, f"run_dir: r\n{data}\ntrain: {{max_steps: 1}}\n")
    assert found == (
        'run.yaml:2: data.train: wants {source: FILE, target: FILE}, or a list of such, got "a.en"'
    )
