"""What a run has to show, gathered from its directory: log, settings, text, scores, attention.

Everything but the log may be missing: a run that still trains, that was cut, that has no checkpoint
yet or whose text is gone gives what there is, and `notes` say what is not. Nothing is written.

Price: the lines of the validation or test set are translated with the best checkpoint and the
run's own search settings, once per report; the bootstrap of their scores adds a few seconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mttrain.attention_maps import (
    attention_maps,
    encode_translation,
    links,
    unit_groups,
    unit_weights,
)
from mttrain.checkpoint import read_meta
from mttrain.config import RunConfig, load_config
from mttrain.dataset import load_raw
from mttrain.errors import CheckpointError, ConfigError, DataError, MissingDependency, MttrainError
from mttrain.metrics import METRICS, Comparison, Score, compare_systems, score_corpus
from mttrain.pictures import Panel
from mttrain.rundir import LOG, Index, read_index, resolve_model
from mttrain.runlog import read_log
from mttrain.storefiles import map_array
from mttrain.translations import Translation
from mttrain.translator import TranslateOptions, Translator

Split = Literal["valid", "test"]
Curve = tuple[list[float], list[float]]
"""Updates and values; a value that is no number is NaN."""

BOOTSTRAP = 1000  # resamples
_MOST_TOKENS = 24  # of a side of a sentence whose attention is shown, if there are such
_MOST_PANELS = 4


@dataclass
class RunFacts:
    """A run as its directory tells it; `label` is its short name among the others."""

    label: str
    path: Path
    records: list[dict[str, Any]]
    settings: dict[str, Any]  # of config.yaml, as plain nested values; empty if unknown
    config: RunConfig | None
    meta: dict[str, Any]  # of the best checkpoint; empty if there is none
    checkpoint: str | None
    index: Index
    notes: list[str] = field(default_factory=list)

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """The records of one kind, oldest first."""
        return [record for record in self.records if record.get("kind") == kind]

    def last(self, kind: str) -> dict[str, Any]:
        """The newest record of a kind; empty if there is none."""
        return next(iter(self.of_kind(kind)[::-1]), {})

    def curve(self, kind: str, name: str) -> Curve:
        """A figure over the updates, from the records that have it."""
        points = [
            (number(record.get("step")), number(record.get(name)))
            for record in self.of_kind(kind)
            if name in record
        ]
        known = [(x, y) for x, y in points if math.isfinite(x)]
        return [x for x, _ in known], [y for _, y in known]

    @property
    def languages(self) -> str:
        """Such as "en → de"; empty if unknown."""
        data = self.settings.get("data")
        known = data if isinstance(data, dict) else self.meta
        names = [known.get("source_lang"), known.get("target_lang")]
        return " → ".join(str(name) for name in names) if all(names) else ""

    def state(self) -> str:
        """How far it came, in words."""
        end, steps = self.last("end"), self.curve("train", "loss")[0]
        if end:
            return f"ended by {end.get('reason', 'an unknown reason')}"
        if not steps:
            return "no update is logged yet"
        return f"still training, or cut: the log ends at update {steps[-1]:g}"


@dataclass
class Heat:
    """A sentence pair, its cross-attention and the word links that are read off it."""

    source: str
    target: str
    panel: Panel
    links: list[str]


@dataclass
class Translated:
    """The lines of one set as a run translates them, and what they score."""

    split: Split
    total: int  # lines of the set, of which `numbers` (from 1) were translated
    numbers: list[int]
    sources: list[str]
    references: list[str]
    found: list[Translation]
    scores: list[Score]
    heats: list[Heat]
    sentence: list[float]  # chrF of each line
    how: str  # the search, in words

    @property
    def texts(self) -> list[str]:
        return [translation.text for translation in self.found]


def number(value: Any) -> float:
    """A figure of the log, which writes "nan", "inf" and "-inf" as words; NaN for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan


# ---- the directory ----------------------------------------------------------------------------


def load_run(path: str | Path, label: str) -> RunFacts:
    """What the directory of a run says. CheckpointError when it is none."""
    folder = Path(path)
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise CheckpointError(f"{folder} {what}; give the directory of a run.")
    if not (folder / LOG).is_file():
        raise CheckpointError(f"{folder} holds no {LOG}; give the directory of a run.")
    records, notes = read_log(folder / LOG), []
    config, settings = None, {}
    try:
        config = load_config(folder / "config.yaml")
        settings = config.model_dump(mode="json")
    except MttrainError as error:
        notes.append(f"The settings cannot be read: {error}")
        for record in records:
            if isinstance(record.get("config"), dict):
                settings = record["config"]
    meta, checkpoint, index = _best(folder, notes)
    return RunFacts(label, folder, records, settings, config, meta, checkpoint, index, notes)


def _best(folder: Path, notes: list[str]) -> tuple[dict[str, Any], str | None, Index]:
    try:
        best = resolve_model(folder)
        return read_meta(best), best.name, read_index(folder)
    except CheckpointError as error:
        notes.append(f"There is no model to translate with: {error}")
        return {}, None, Index()


def labels(paths: Sequence[str | Path]) -> list[str]:
    """A short name for each run: of its path as much of the end as tells it from the others."""
    parts = [Path(path).resolve().parts for path in paths]
    size = 1
    while len({part[-size:] for part in parts}) < len(parts) and size < max(map(len, parts)):
        size += 1
    return ["/".join(part[-size:]) for part in parts]


def lengths(run: RunFacts) -> dict[str, NDArray[Any]]:
    """Subwords, EOS included, of the training pairs by side, from the encoded text of the run.

    Empty when that is gone or is not what the log speaks of.
    """
    encoded = run.last("encoded")
    data = run.settings.get("data")
    cache = data.get("cache_dir") if isinstance(data, dict) else None
    folder = Path(cache) if isinstance(cache, str) else run.path / "data"
    for path in sorted(folder.glob("train-*.json")):
        try:
            index = json.loads(path.read_bytes())
            if index["corpora"] == encoded.get("corpora"):
                return {side: _side_lengths(path, index, side) for side in ("source", "target")}
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            continue
    return {}


def _side_lengths(path: Path, index: dict[str, Any], side: str) -> NDArray[Any]:
    """From the places where the pairs begin. ValueError when the file is not the one meant."""
    offsets = map_array(path.with_name(f"{path.stem}.{side}.offsets"), "int64")
    found = np.diff(offsets)
    if len(found) != sum(corpus["pairs"] for corpus in index["corpora"]) or found.min() < 1:
        raise ValueError("damaged")
    return found


# ---- translating ------------------------------------------------------------------------------


def chosen_split(run: RunFacts, wanted: Split | None) -> Split:
    """The set that is translated: the one asked for, else the test set if the run has one."""
    has_test = run.config is not None and run.config.data.test is not None
    if wanted == "test" and run.config is not None and not has_test:
        raise ConfigError(f"{run.path} has no test set; use --split valid.")
    return wanted or ("test" if has_test else "valid")


def translate_run(
    run: RunFacts,
    split: Split,
    lines: int,
    *,
    device: str = "auto",
    threads: int | None = None,
    progress: Callable[[Iterator[Translation]], Iterator[Translation]] = lambda found: found,
) -> Translated | None:
    """Translate at most `lines` lines of a set, evenly spread, and score them.

    None, with a note, when there is no model or no text. progress: wraps the translations.
    """
    if run.config is None or run.checkpoint is None or lines == 0:
        return None
    data = run.config.data
    corpus = data.test if split == "test" else data.valid
    assert corpus is not None
    try:
        sources, references = load_raw(corpus, data)
    except DataError as error:
        run.notes.append(
            f"Nothing was translated: {error} Paths count from the directory that training was "
            "started in; the figures and samples below are those of the log."
        )
        return None
    total = len(sources)
    places = [n * total // min(lines, total) for n in range(min(lines, total))]
    sources, references = ([side[place] for place in places] for side in (sources, references))
    try:
        translator = Translator.load(run.path, device=device, threads=threads)
    except (CheckpointError, DataError) as error:  # damaged, or removed by the training meanwhile
        run.notes.append(f"Nothing was translated: {error}")
        return None
    wanted = TranslateOptions(**run.config.decode.model_dump(), tag=data.tag_of(corpus))
    options = translator.completed(wanted)
    found = list(progress(translator.translate_lines(sources, options)))
    texts = [translation.text for translation in found]
    return Translated(
        split,
        total,
        [place + 1 for place in places],
        sources,
        references,
        found,
        _scored(run, texts, references, data.langs_of(corpus)[1]),
        _heats(translator, found, options),
        sentence_scores(texts, references),
        f"beam {options.beam}, length penalty {options.length_penalty:g}",
    )


def _scored(run: RunFacts, texts: list[str], references: list[str], lang: str) -> list[Score]:
    """With 95 % intervals; without BLEU, and a note, where its tokenizer is not to be had."""
    scores = []
    for name in METRICS:
        try:
            scores += _one_score(name, texts, references, lang)
        except MissingDependency as error:
            run.notes.append(str(error))
    return scores


def _one_score(name: str, texts: list[str], references: list[str], lang: str) -> list[Score]:
    resamples = BOOTSTRAP if len(texts) > 1 else 0
    return score_corpus(texts, [references], lang=lang, metrics=[name], bootstrap=resamples)


def sentence_scores(texts: Sequence[str], references: Sequence[str]) -> list[float]:
    """chrF of each line: unlike BLEU it says something about a single sentence."""
    from sacrebleu.metrics.chrf import CHRF

    metric = CHRF()
    return [
        float(metric.sentence_score(text, [reference]).score)
        for text, reference in zip(texts, references, strict=True)
    ]


def same_lines(one: Translated, other: Translated) -> bool:
    """Whether two runs translated the same sources and are measured by the same references."""
    return one.sources == other.sources and one.references == other.references


def compare_runs(one: Translated, other: Translated, lang: str) -> list[Comparison] | None:
    """The second run against the first on the same lines; None when the lines are others."""
    if not same_lines(one, other) or len(one.sources) < 2:
        return None
    metrics = [name for name in METRICS if name in {score.name.lower() for score in one.scores}]
    return compare_systems(
        one.texts, other.texts, [one.references], lang=lang, metrics=metrics, samples=BOOTSTRAP
    )


def _heats(
    translator: Translator, found: Sequence[Translation], options: TranslateOptions
) -> list[Heat]:
    """Cross-attention of a few pairs, evenly spread over those that fit on a page."""
    pairs = [
        (translation, encode_translation(translator, translation, options))
        for translation in found
        if not translation.blank and translation.pieces == 1 and translation.text.strip()
    ]
    short = [item for item in pairs if _longer_side(item) <= _MOST_TOKENS]
    if not short:  # long sentences only: the shortest, if it fits on a page at all
        short = [item for item in sorted(pairs, key=_longer_side)[:1] if _longer_side(item) <= 80]
    count = min(_MOST_PANELS, len(short))
    return [
        _heat(translator, *short[(2 * n + 1) * len(short) // (2 * count)]) for n in range(count)
    ]


def _longer_side(item: tuple[Translation, Any]) -> int:
    return max(len(item[1].source), len(item[1].target))


def _heat(translator: Translator, translation: Translation, pair: Any) -> Heat:
    maps = attention_maps(translator, pair, ["cross"])
    weights = maps.weights["cross"][-1].mean(0)
    rows, columns = maps.axes("cross")
    source = unit_groups(translator.source_tokenizer, pair.source, "word")
    target = unit_groups(translator.target_tokenizer, pair.target, "word")
    words, others = translation.source.split(), translation.text.split()
    named = [f"{words[s]} – {others[t]}" for s, t in links(unit_weights(weights, source, target))]
    return Heat(translation.source, translation.text, Panel(weights.numpy(), rows, columns), named)
