"""A starting configuration: facts that are counted right, settings that grow with the corpus."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mttrain.batching import plan_epoch
from mttrain.config import RunConfig, load_config
from mttrain.corpus import Pair
from mttrain.starter import TABLE, Machine, Sizes, Texts, sizing, starter_yaml
from mttrain.survey import Facts, Sample, Side, survey
from mttrain.tokenizer import train_tokenizer

CPU, GPU = Machine(2, False), Machine(2, True)
SIZES = [2, 50, 999, 4_999, 5_000, 29_000, 160_000, 700_000, 4_500_000, 40_000_000]


def facts(pairs: int, script: str = "LATIN", other: str = "LATIN", mean: float = 60.0) -> Facts:
    sides = [Side(mean, int(2.5 * mean), 90, name) for name in (script, other)]
    return Facts(pairs, 0, *sides)


def pairs(lines: list[tuple[str, str]]) -> list[Pair]:
    return [Pair(number, *line) for number, line in enumerate(lines, 1)]


# ---- facts ------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.text("abä ", max_size=6), st.text("abд你 ", max_size=6)), max_size=40),
    st.integers(1, 50),
)
def test_counts_are_those_of_a_plain_count(lines: list[tuple[str, str]], size: int) -> None:
    """Stops figures that a loop over the pairs does not give."""
    found, sample = survey(pairs(lines), sample=size, seed=3)
    full = [line for line in lines if line[0].strip() and line[1].strip()]
    assert (found.pairs, found.blank) == (len(full), len(lines) - len(full))
    assert len(sample) == min(size, len(full))
    drawn = Counter((pair.source, pair.target) for pair in sample)
    assert drawn <= Counter(full)
    for index, side in enumerate((found.source, found.target)):
        lengths = sorted(len(line[index]) for line in full)
        if lengths:
            assert side.mean == pytest.approx(sum(lengths) / len(lengths))
            assert sum(length <= side.long for length in lengths) >= 0.99 * len(lengths) - 1


def test_the_sample_is_fair() -> None:
    """Stops a sample from the beginning of the file, where a corpus often has its easy part."""
    lines = pairs([(f"a{n}", f"b{n}") for n in range(1000)])
    hits = Counter[int]()
    for seed in range(200):
        _, sample = survey(lines, sample=50, seed=seed)
        hits.update(int(pair.source[1:]) // 100 for pair in sample)
    # 10,000 draws into 10 parts: 1,000 each, standard deviation 29.
    assert all(850 < hits[part] < 1150 for part in range(10)), hits


def test_the_same_seed_draws_the_same() -> None:
    lines = pairs([(f"a{n}", f"b{n}") for n in range(300)])
    one, two, other = (survey(lines, sample=40, seed=seed)[1] for seed in (1, 1, 2))
    assert one == two != other


def test_scripts_are_told_apart() -> None:
    """Stops one vocabulary for Latin and Chinese, where next to nothing is shared."""
    lines = [("The dog runs.", "狗在跑。"), ("A cat sleeps.", "一只猫在睡觉。")] * 5
    found, _ = survey(pairs(lines), sample=100, seed=1)
    assert (found.source.script, found.target.script) == ("LATIN", "CJK")
    values = sizing(found, "zh", CPU).values()
    assert values["tokenizer.shared"] is False and values["model.tie"] == "target"
    assert values["train.best_metric"] == "chrf"
    assert sizing(facts(20_000), "de", CPU).values()["tokenizer.shared"] is True


# ---- sizes ------------------------------------------------------------------------------------


def parameters(sizes: Sizes) -> float:
    at = sizes.values()
    layer = 4 * at["model.d_model"] ** 2 + 2 * at["model.d_model"] * at["model.d_ff"]
    return layer * (at["model.encoder_layers"] + at["model.decoder_layers"])


@pytest.mark.parametrize("machine", [CPU, GPU], ids=["cpu", "gpu"])
def test_more_text_never_means_less(machine: Machine) -> None:
    """Stops a table in which more text gets a smaller model or vocabulary, or more dropout."""
    found = [sizing(facts(size), "de", machine) for size in SIZES]
    rising: list[Callable[[Sizes], float]] = [
        lambda s: s.values()["tokenizer.vocab_size"],
        lambda s: s.values()["train.batch_tokens"] * s.values().get("train.accumulate", 1),
        parameters,
        # R-Drop of 5 stands for a tenth of dropout.
        lambda s: -round(s.values()["model.dropout"] + s.values().get("optim.rdrop", 0) / 50, 3),
        lambda s: -s.values()["optim.lr"],
    ]
    for figure in rising:
        values = [figure(sizes) for sizes in found]
        assert values == sorted(values), values
    epochs = [sizes.epochs for sizes in found]  # of steps that are rounded to two digits
    assert all(more <= 1.06 * less for less, more in itertools.pairwise(epochs)), epochs


def test_a_gpu_never_gets_less() -> None:
    for size in SIZES:
        cpu, gpu = (sizing(facts(size), "de", machine) for machine in (CPU, GPU))
        assert parameters(cpu) <= parameters(gpu) and cpu.epochs <= 1.01 * gpu.epochs


def test_a_cpu_is_done_in_hours() -> None:
    """Stops a file whose training takes a week; more cores may do more, and never less."""
    for size in SIZES:
        hours = sizing(facts(size), "de", CPU).hours
        assert hours is not None and hours < 9
        some, many = (sizing(facts(size), "de", Machine(n, False)).epochs for n in (2, 16))
        assert some <= 1.05 * many


def test_the_rows_are_those_of_the_measured_recipes() -> None:
    """Stops the table from leaving the shipped configurations that it is taken from."""
    folder = Path(__file__).resolve().parents[2] / "configs"
    multi30k = load_config(folder / "multi30k_en_de.yaml")
    at = sizing(facts(29_000), "de", Machine(2, False, halves=True)).values()
    for key in ("d_model", "d_ff", "num_heads", "encoder_layers", "dropout", "norm", "tie"):
        assert at[f"model.{key}"] == getattr(multi30k.model, key), key
    assert at["optim.lr"] == multi30k.optim.lr
    assert at["optim.rdrop"] == multi30k.optim.rdrop
    assert at["train.precision"] == multi30k.train.precision
    assert at["train.batch_tokens"] == multi30k.train.batch_tokens
    assert at["tokenizer.vocab_size"] == multi30k.tokenizer.vocab_size
    for key in ("keep_last", "average", "average_of", "ema"):
        assert at[f"train.{key}"] == getattr(multi30k.train, key), key
    iwslt = load_config(folder / "iwslt14_de_en.yaml")
    at = sizing(facts(160_000), "en", GPU).values()
    for key in ("d_model", "d_ff", "num_heads", "encoder_layers", "dropout"):
        assert at[f"model.{key}"] == getattr(iwslt.model, key), key
    assert at["tokenizer.vocab_size"] == iwslt.tokenizer.vocab_size
    base = load_config(folder / "wmt14_en_de_base.yaml")
    at = sizing(facts(4_500_000), "de", GPU).values()
    for key in ("d_model", "d_ff", "num_heads", "encoder_layers", "dropout"):
        assert at[f"model.{key}"] == getattr(base.model, key), key
    assert at["train.batch_tokens"] == base.train.batch_tokens
    assert at["train.accumulate"] == base.train.accumulate


def test_the_estimate_of_time_is_that_of_the_measured_run() -> None:
    """Stops an estimate that is off by more than a factor of two: docs/experiments.md has 4.6
    updates a second of the 29,000 pairs of Multi30k on two cores, in bfloat16."""
    sizes = sizing(facts(29_000, mean=66.0), "de", Machine(2, False, halves=True))
    assert sizes.hours is not None
    per_update = 3600 * sizes.hours / sizes.values()["train.max_steps"]
    assert 0.5 < per_update * 4.6 < 2


@pytest.mark.parametrize("machine", [CPU, GPU], ids=["cpu", "gpu"])
def test_passes_are_those_of_the_batches(machine: Machine) -> None:
    """Stops a number of passes that training does not make: the same vocabulary and batches."""
    chooser = random.Random(5)
    words = ["".join(chooser.choices("abcdefgh", k=chooser.randint(7, 12))) for _ in range(300)]
    lines = [" ".join(chooser.choices(words, k=chooser.randint(1, 40))) for _ in range(2_000)]
    text = pairs([(line, line[::-1]) for line in lines])
    found, drawn = survey(text, sample=5_000, seed=1)
    sizes = sizing(found, "de", machine, Sample(drawn, len(drawn)))
    at = sizes.values()
    tokenizer = train_tokenizer(
        (side for pair in text for side in (pair.source, pair.target)),
        vocab_size=at["tokenizer.vocab_size"],
    )
    source, target = (
        [len(tokenizer.encode(getattr(pair, side))) + 1 for pair in text]
        for side in ("source", "target")
    )
    assert at["data.max_length"] >= max(*source, *target)
    plan = plan_epoch(1, 3, source, target, batch_tokens=at["train.batch_tokens"])
    updates = len(plan) / at.get("train.accumulate", 1)
    assert sizes.epochs == pytest.approx(at["train.max_steps"] / updates, rel=0.02)
    guess = sizing(found, "de", machine)
    assert guess.epochs != pytest.approx(guess.values()["train.max_steps"] / updates, rel=0.1)


def test_a_sample_stands_for_more() -> None:
    """Stops passes that grow with the share of the text that was looked at."""
    lines = pairs([(f"{'a b ' * (n % 13)} c{n}", f"{'x ' * (n % 7)} y{n}") for n in range(3_000)])
    whole, part = Sample(lines, 3_000), Sample(lines[::3], 3_000)
    sizes = {"max_length": 512, "batch_tokens": 1_024}
    one, two = (sample.updates(400, True, **sizes, accumulate=1) for sample in (whole, part))
    assert one is not None and two == pytest.approx(one, rel=0.04)
    four = whole.updates(400, True, **sizes, accumulate=4)
    assert four == -(-one // 4)
    assert whole.updates(400, True, max_length=2, batch_tokens=1_024, accumulate=1) is None
    huge = Sample(lines, 30_000_000).updates(400, True, **sizes, accumulate=1)
    assert huge == pytest.approx(10_000 * one, rel=0.04)


def test_the_trial_that_the_file_names_is_one(tmp_path: Path) -> None:
    """Stops a comment with settings that `--set` refuses: warm-up must end before the updates."""
    for size in SIZES:
        sizes = sizing(facts(size), "de", CPU)
        _, text = written(tmp_path, sizes, None)
        (line,) = (line for line in text.splitlines() if "a shorter trial" in line)
        settings = [part.split()[0].rstrip(".") for part in line.split("--set ")[1:]]
        loaded = load_config(tmp_path / "x.yaml", settings)
        steps = loaded.train.max_steps
        assert steps is not None
        assert loaded.optim.warmup_steps < steps < sizes.values()["train.max_steps"]
        assert loaded.optim.warmup_steps < sizes.values()["optim.warmup_steps"]


def test_rows_stand_in_order() -> None:
    assert [row.pairs for row in TABLE] == sorted({row.pairs for row in TABLE})
    assert TABLE[0].pairs == 0


# ---- the file ---------------------------------------------------------------------------------

SCRIPTS = ["LATIN", "CYRILLIC", "CJK", "HIRAGANA", "HANGUL", "THAI", ""]


def written(tmp_path: Path, sizes: Sizes, other: Sizes | None, **top: str) -> tuple[RunConfig, str]:
    values = {"run_dir": "runs/x", "seed": 1, "source_lang": "en", "target_lang": "de", **top}
    texts = {"train": Texts(("a b,{c.en", "#1: x.de")), "valid": Texts(("v.tsv",))}
    text = starter_yaml(["one", ""], values, texts, sizes, other)
    path = tmp_path / "x.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path), text


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("machine", [CPU, GPU], ids=["cpu", "gpu"])
def test_each_file_loads_and_says_what_was_chosen(
    tmp_path: Path, size: int, machine: Machine
) -> None:
    """Stops a file that `train` refuses, or one that says other values than were chosen."""
    chooser = random.Random(size)
    for _ in range(5):
        found = facts(
            size, chooser.choice(SCRIPTS), chooser.choice(SCRIPTS), 10 ** chooser.uniform(0, 4)
        )
        lang = chooser.choice(["de", "zh", "ja", "no"])
        sizes = sizing(found, lang, machine)
        other = None if machine.gpu else sizing(found, lang, GPU)
        loaded, text = written(tmp_path, sizes, other, target_lang=lang)
        assert loaded.data.target_lang == lang
        assert loaded.data.train[0].source == "a b,{c.en"
        assert loaded.data.train[0].target == "#1: x.de"
        assert loaded.data.valid.pairs == "v.tsv"
        plain = loaded.model_dump(mode="json")
        for key, value in sizes.values().items():
            section, name = key.split(".")
            assert plain[section][name] == value, key
        lines = text.splitlines()
        assert all(len(line) <= 130 for line in lines)
        for key in sizes.settings:
            name = key.partition(".")[2]
            (at,) = (n for n, line in enumerate(lines) if line.startswith(f"  {name}: "))
            assert lines[at - 1].startswith("  # "), f"{name} comes without its reason"


def test_what_a_gpu_would_change_can_be_set(tmp_path: Path) -> None:
    """Stops the closing comment from naming keys or values that `--set` refuses."""
    sizes, other = sizing(facts(160_000), "de", CPU), sizing(facts(160_000), "de", GPU)
    _, text = written(tmp_path, sizes, other)
    lines = text.split("# On a GPU")[1].splitlines()[1:]
    changes = [line.removeprefix("#   ").replace(": ", "=", 1) for line in lines]
    assert "model.d_model=512" in changes
    loaded = load_config(tmp_path / "x.yaml", changes).model_dump(mode="json")
    for key, value in other.values().items():
        section, name = key.split(".")
        assert loaded[section][name] == value, key
