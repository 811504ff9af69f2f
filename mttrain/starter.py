"""A starting point for a corpus: the settings that suit its size.

`sizing` is a small function from what `survey` found and from the machine to settings, each with
its reason; `starter_yaml` writes them as a commented file. The settings are a beginning: nothing
here was searched for on the corpus itself. Only the length of a pass over the text is measured.

Price: that of the vocabulary that is learned on a sample (module survey); the rest is nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mttrain.languages import CHINESE, JAPANESE, base_code
from mttrain.survey import Facts, Sample, Side
from mttrain.yamlio import dump_yaml

HOURS = 8.0  # of training on a CPU, at most, where the settings of the corpus would take longer
CORE_SPEED = 5e10  # floating point operations a second that training gets from a core
_UNSPACED = ("CJK", "HIRAGANA", "KATAKANA", "HANGUL")


# ---- sizes ------------------------------------------------------------------------------------


class Shape(NamedTuple):
    """A model; `lr` is the peak rate that it stands with pre-norm."""

    d_model: int
    d_ff: int
    num_heads: int
    layers: int
    lr: float

    def operations(self, vocabulary: int) -> float:
        """Of training, for a token of each side: 6 for each weight that multiplies (Kaplan et al.
        2020, section 2.1); attention over short sentences is small beside them."""
        encoder = 4 * self.d_model**2 + 2 * self.d_model * self.d_ff
        decoder = encoder + 4 * self.d_model**2
        return 6.0 * (self.layers * (encoder + decoder) + self.d_model * vocabulary)


SMALLEST = Shape(128, 256, 4, 2, 4e-3)
SMALL = Shape(128, 256, 4, 4, 4e-3)
MIDDLE = Shape(256, 1024, 4, 4, 1e-3)
LARGE = Shape(512, 1024, 4, 6, 7e-4)
BASE = Shape(512, 2048, 8, 6, 7e-4)


class Row(NamedTuple):
    """Settings from `pairs` pairs upwards."""

    pairs: int
    vocabulary: int
    cpu: Shape
    gpu: Shape
    dropout: float
    rdrop: float
    batch_tokens: int  # of an update, padded, of each side
    epochs: int


TABLE = (
    Row(0, 1_000, SMALLEST, SMALLEST, 0.3, 0, 1_024, 100),
    Row(5_000, 2_000, SMALL, SMALL, 0.3, 0, 1_024, 75),
    Row(20_000, 10_000, SMALL, SMALL, 0.2, 5, 1_536, 70),
    Row(100_000, 10_000, MIDDLE, LARGE, 0.3, 0, 4_096, 30),
    Row(500_000, 16_000, MIDDLE, BASE, 0.2, 0, 8_192, 25),
    Row(2_000_000, 32_000, MIDDLE, BASE, 0.1, 0, 25_600, 20),
)
"""Where the rows come from.

- 20,000: configs/multi30k_en_de.yaml, measured (docs/experiments.md, "a longer run with R-Drop").
  R-Drop (Liang et al. 2021) regularises beside dropout; on more text it was not tried.
- 100,000 on a GPU: configs/iwslt14_de_en.yaml, the customary model and vocabulary for 160,000
  pairs, with pre-norm and its rate from configs/en_zh.yaml.
- 2,000,000 on a GPU: the base model of Vaswani et al. 2017, sections 5 and 6: dropout 0.1, 25,000
  tokens an update, 100,000 updates, which are 20 passes over 4.5 million pairs.
- Below: less text wants a smaller vocabulary (Sennrich and Zhang 2019), fewer layers and more
  dropout than the defaults of the paper (Araabi and Monz 2020); small batches did better on the
  demo corpus (docs/experiments.md, "batch size and length of the demo run").
- MIDDLE is what a CPU trains on more text within `HOURS`; the rest is interpolated.
"""
CPU_VOCABULARY = 16_000  # the output projection costs as much as all layers of MIDDLE there
CPU_BATCH = 4_096  # more updates in the same time
PART = 6_400  # padded tokens that go through the model at once, at most


@dataclass(frozen=True)
class Machine:
    """Where training will run. cores: of the CPU; gpu: whether that is left idle; halves: whether
    it multiplies bfloat16 faster than float32."""

    cores: int
    gpu: bool
    halves: bool = False


@dataclass(frozen=True)
class Sizes:
    """Settings, by dotted key, each with its value and the reason for it."""

    settings: dict[str, tuple[Any, str]]
    epochs: float
    hours: float | None  # on a CPU: estimated

    def values(self) -> dict[str, Any]:
        """Dotted key -> value."""
        return {key: value for key, (value, _) in self.settings.items()}


def sizing(facts: Facts, target_lang: str, machine: Machine, sample: Sample | None = None) -> Sizes:
    """The settings for a corpus on a machine; see TABLE for where they come from.

    Without a sample of the pairs the number of subwords is a guess from that of the characters.
    """
    row = [row for row in TABLE if row.pairs <= facts.pairs or row is TABLE[0]][-1]
    shape = row.gpu if machine.gpu else row.cpu
    batch = row.batch_tokens if machine.gpu else min(row.batch_tokens, CPU_BATCH)
    shared = _script(facts.source) == _script(facts.target)
    vocabulary = _vocabulary(row, facts, shared, machine)
    longest, updates = _text(facts, vocabulary, shared, batch, sample)
    steps = max(500.0, row.epochs * updates)
    speed = CORE_SPEED * machine.cores * (2 if machine.halves else 1)
    passes = 2 if row.rdrop else 1
    cost = passes * batch * shape.operations(vocabulary) / speed  # seconds
    wanted = steps
    if not machine.gpu:
        steps = min(steps, HOURS * 3600 / cost)
    steps = _rounded(steps)
    epochs = steps / updates
    hours = None if machine.gpu else steps * cost / 3600
    found = {
        **_vocabulary_settings(facts, shared, vocabulary),
        **_model_settings(facts, shape, row, shared),
        **_optim_settings(shape, row, steps),
        **_train_settings(machine, batch, steps, epochs, hours, wanted),
        **_average_settings(row),
    }
    if base_code(target_lang) in CHINESE | JAPANESE:
        why = "counts characters, so that it depends on no word segmentation"
        found["train.best_metric"] = ("chrf", why)
    why = f"subwords of a side; 99 % of the lines have up to about {round(longest)}"
    return Sizes({"data.max_length": (_max_length(longest), why), **found}, epochs, hours)


def _text(
    facts: Facts, vocabulary: int, shared: bool, batch: int, sample: Sample | None
) -> tuple[float, float]:
    """Subwords that 99 % of the lines do not exceed, and updates of a pass over the text."""
    sides = (facts.source, facts.target)
    rates = [_characters_per_token(side, vocabulary) for side in sides]
    per_pair = max(side.mean / rate + 1 for side, rate in zip(sides, rates, strict=True))
    guess = max(1.0, facts.pairs * per_pair) / batch
    if sample is None or not sample.pairs:
        return max(side.long / rate for side, rate in zip(sides, rates, strict=True)), guess
    lengths = sample.lengths(vocabulary, shared)
    longest = max(float(np.quantile(side, 0.99)) for side in lengths)
    parts = -(-batch // PART)
    updates = sample.updates(
        vocabulary,
        shared,
        max_length=_max_length(longest),
        batch_tokens=batch // parts,
        accumulate=parts,
    )
    return longest, guess if updates is None else updates


def _max_length(longest: float) -> int:
    """A limit that leaves room above what 99 % of the lines have."""
    return next((size for size in (128, 256, 512) if size >= 1.5 * longest), 1024)


def _script(side: Side) -> str:
    """The family of a script: Japanese text shares its characters with Chinese."""
    return "CJK" if side.script in ("CJK", "HIRAGANA", "KATAKANA") else side.script


def _vocabulary(row: Row, facts: Facts, shared: bool, machine: Machine) -> int:
    """Entries; of each side where the sides have their own."""
    size = row.vocabulary if machine.gpu else min(row.vocabulary, CPU_VOCABULARY)
    if not shared:
        size = 6 * size // 10
    # A character that is no entry of its own costs three tokens, its bytes.
    characters = max(facts.source.characters, facts.target.characters)
    return max(size, 400, 500 * -(-(260 + characters) // 500) if characters > 500 else 0)


def _characters_per_token(side: Side, vocabulary: int) -> float:
    """A rough average: a larger vocabulary has longer pieces; a syllable or word sign is one."""
    if side.script.startswith(_UNSPACED):
        return 1.4
    return min(4.8, 4.0 * math.pow(vocabulary / 10_000, 0.25))


def _rounded(steps: float) -> int:
    """Two significant digits."""
    unit = int(math.pow(10, max(0, len(str(int(steps))) - 2)))
    return max(1, round(steps / unit) * unit)


def _vocabulary_settings(facts: Facts, shared: bool, vocabulary: int) -> dict[str, tuple[Any, str]]:
    scripts = f"{facts.source.script or 'no'} and {facts.target.script or 'no'} letters"
    same = f"both sides have {facts.source.script or 'no'} letters"
    each = "of each side; " if not shared else ""
    return {
        "tokenizer.vocab_size": (
            vocabulary,
            f"{each}{facts.pairs:,} pairs would show the entries of a larger one too rarely",
        ),
        "tokenizer.shared": (
            shared,
            f"{same}: names, numbers and word parts are shared"
            if shared
            else f"{scripts}: next to nothing is shared",
        ),
    }


def _model_settings(
    facts: Facts, shape: Shape, row: Row, shared: bool
) -> dict[str, tuple[Any, str]]:
    size = f"for {facts.pairs:,} pairs"
    return {
        "model.d_model": (shape.d_model, f"width of the layers, {size}"),
        "model.d_ff": (shape.d_ff, "inner width of the feed-forward blocks"),
        "model.num_heads": (shape.num_heads, f"of {shape.d_model // shape.num_heads} each"),
        "model.encoder_layers": (shape.layers, "a deeper model learns little text by heart"),
        "model.decoder_layers": (shape.layers, "as many; fewer translate faster"),
        "model.dropout": (
            row.dropout,
            "less text needs more; lower it if the training loss stays near that of validation",
        ),
        "model.norm": ("pre", "stands the rate below with a short warm-up"),
        "model.tie": (
            ("all", "one embedding matrix for source, target and output")
            if shared
            else ("target", "target embeddings and output are one matrix")
        ),
    }


def _optim_settings(shape: Shape, row: Row, steps: int) -> dict[str, tuple[Any, str]]:
    warmup = max(1, min(4_000, _rounded(0.08 * steps)))
    trial = min(300, max(1, steps // 2))
    rise = max(1, min(warmup // 2, trial // 6))
    shorter = f"--set train.max_steps={trial} --set optim.warmup_steps={rise}"
    found: dict[str, tuple[Any, str]] = {
        "optim.lr": (shape.lr, "peak; wider models need a lower one"),
        "optim.schedule": ("linear", "down to zero at max_steps"),
        "optim.warmup_steps": (
            warmup,
            f"updates of rise, 8 % of all; a shorter trial lowers both: {shorter}",
        ),
        "optim.label_smoothing": (0.1, "as in the paper"),
    }
    if row.rdrop:
        why = "R-Drop: two passes over each batch that are to agree; twice the time, 0 without it"
        found["optim.rdrop"] = (row.rdrop, why)
    return found


def _train_settings(
    machine: Machine, batch: int, steps: int, epochs: float, hours: float | None, wanted: float
) -> dict[str, tuple[Any, str]]:
    parts = -(-batch // PART)
    found: dict[str, tuple[Any, str]] = {}
    if machine.halves and not machine.gpu:
        why = "this CPU has instructions for it, which halve the time; others train in fp32"
        found["train.precision"] = ("bf16", why)
    why = "padded tokens of a side; out of memory: halve it and double accumulate"
    found["train.batch_tokens"] = (batch // parts, why)
    if parts > 1:
        why = f"so many batches make an update of {batch:,} tokens"
        found["train.accumulate"] = (parts, why)
    passes = f"{_rounded(epochs)}" if epochs >= 10 else f"{epochs:.2g}"
    why = f"about {passes} passes over the text"
    if hours is not None:
        time = f"{hours:.2g} h" if hours >= 1 else f"{max(1, round(60 * hours))} min"
        why += f"; on this CPU some {time} (estimated)"
    if wanted > 1.1 * steps:
        why += f"; {_rounded(wanted)} would be better, if the time is there"
    every = max(1, min(2_000, _rounded(steps / 30)))
    return found | {
        "train.max_steps": (steps, why),
        "train.valid_every": (every, "updates between validations, each with a checkpoint"),
    }


def _average_settings(row: Row) -> dict[str, tuple[Any, str]]:
    kept = "checkpoints, besides the best"
    if not row.rdrop:
        why = "of the last ones, at the end; kept if it scores better"
        return {"train.keep_last": (10, kept), "train.average": (10, why)}
    return {
        "train.keep_last": (4, kept),
        "train.average": (4, "checkpoints are averaged at the end; kept if that scores better"),
        "train.average_of": ("both", "a mean of the last ones and one of the best"),
        "train.ema": (0.999, "a running mean of the weights, as one more candidate"),
    }


# ---- the file ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Texts:
    """The files of a split: source and target, or one file of pairs."""

    files: tuple[str, ...]

    def plain(self) -> dict[str, str]:
        """As in the configuration."""
        names = ("source", "target") if len(self.files) == 2 else ("pairs",)
        return dict(zip(names, self.files, strict=True))


def starter_yaml(
    head: Iterable[str],
    top: Mapping[str, Any],
    texts: Mapping[str, Texts],
    sizes: Sizes,
    other: Sizes | None,
) -> str:
    """The commented file. head: its first comment lines; top: run_dir and other plain settings by
    dotted key; texts: by split; other: sizes for a GPU, to be named in a comment."""
    lines = [f"# {line}" if line else "#" for line in head]
    lines += ["# Vocabulary, checkpoints and log; the same command again resumes what lies there."]
    lines += [f"run_dir: {_scalar(top['run_dir'])}"]
    lines += ["# Of the first weights, the order of the pairs and dropout."]
    lines += [f"seed: {_scalar(top['seed'])}", "", "data:"]
    for name in ("source_lang", "target_lang"):
        lines.append(f"  {name}: {_scalar(top[name])}")
    for split, text in texts.items():
        lines.append(f"  {split}:")
        lines += [f"    {key}: {_scalar(value)}" for key, value in text.plain().items()]
    section = "data"
    for key, (value, why) in sizes.settings.items():
        name, _, setting = key.partition(".")
        if name != section:
            lines += ["", f"{name}:"]
            section = name
        lines += [f"  # {why[0].upper()}{why[1:]}.", f"  {setting}: {_scalar(value)}"]
    if top.get("device"):
        lines += ["  # As asked for; auto takes a GPU where there is one."]
        lines += [f"  device: {_scalar(top['device'])}"]
    lines += ["", "decode:", "  # Hypotheses kept in the search; 1 is fastest.", "  beam: 5"]
    lines += [
        "  # Rank by log-probability / length^A; larger means longer.",
        "  length_penalty: 1.0",
    ]
    return "\n".join([*lines, *_alternative(sizes, other)]) + "\n"


def _alternative(sizes: Sizes, other: Sizes | None) -> Iterator[str]:
    """What to change on a GPU."""
    if other is None:
        return
    here, there = sizes.values(), other.values()
    changed = [f"{key}: {_scalar(there[key])}" for key in there if here.get(key) != there[key]]
    dropped = [f"{key}: remove it" for key in here if key not in there]
    yield ""
    if changed or dropped:
        yield "# On a GPU these settings suit the corpus better (mttrain init --device cuda):"
        yield from (f"#   {line}" for line in [*changed, *dropped])
    else:
        yield "# On a GPU the same settings suit the corpus; it is only sooner done."


def _scalar(value: Any) -> str:
    """A value in YAML, quoted where it must be; rates as people write them."""
    if isinstance(value, float) and 0 < value < 0.01:
        mantissa, exponent = f"{value:e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return dump_yaml({"k": value}).removeprefix("k: ").rstrip("\n")
