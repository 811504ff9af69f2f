"""What the runs of an ablation show: figures read from their logs, and tables made of the figures.

Nothing is trained or scored here, and torch is not needed. A figure comes from one place: BLEU,
chrF and likelihood from the records of validation and of the candidates for the result, the rest
from those of the updates, of which there is one each (`train.log_every: 1`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from bench_setup import figure, table

BLEUS = (5.0, 10.0, 15.0)  # how soon a run reaches these is how fast it learns
HIGH = 5.0  # a gradient norm is high above this many medians of its run
SINGLE = "single"  # the best checkpoint as it was trained, among the candidates
MEANS = {"average": "mean of the last checkpoints", "ema": "running mean"}

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Figures:
    """One run so far; None where its log has no such figure (yet).

    validations: (update, greedy BLEU) of each. greedy, nats_per_token, bits_per_character: of the
    last validation of a finished run; the likelihood is that of the reference, EOS included.
    candidates: scores with the decode settings, by `single`, `average`, `ema`; best: which of them
    is the result. mean_change, largest_change: of the training loss from one update to the next, in
    percent of its mean. high_norms: updates with a high gradient norm. how: signature and search.
    """

    finished: bool = False
    updates: int = 0
    parameters: int | None = None
    pairs: int | None = None  # of the training text, those skipped not counted
    validations: tuple[tuple[int, float], ...] = ()
    greedy: float | None = None
    nats_per_token: float | None = None
    bits_per_character: float | None = None
    candidates: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    best: str | None = None
    seconds: float | None = None  # in updates, validation not counted
    pairs_per_second: float | None = None
    mean_change: float | None = None
    largest_change: float | None = None
    high_norms: int | None = None
    how: str = ""

    @property
    def bleu(self) -> float | None:
        """Of the result, with the decode settings."""
        return None if self.best is None else self.candidates[self.best]["bleu"]

    @property
    def chrf(self) -> float | None:
        """Of the result, with the decode settings."""
        return None if self.best is None else self.candidates[self.best]["chrf"]

    def reached(self, bleu: float) -> int | None:
        """The update of the first validation with at least this BLEU."""
        return next((step for step, value in self.validations if value >= bleu), None)


def read_figures(records: Sequence[Record], characters: int, settled: int) -> Figures:
    """The figures in a log. characters: of the references of the validation set; settled: the
    update after which the loss should fall smoothly, that is the end of the warm-up of the base."""
    train, valid = _all(records, "train"), _all(records, "valid")
    end, begin = _last(records, "end"), _last(records, "begin")
    encoded, found = _last(records, "encoded"), _last(records, "candidates")
    seconds = (end or (train[-1] if train else {})).get("seconds")
    updates = max((r["step"] for r in train), default=0)
    batch = begin["config"]["train"]["batch_size"] if begin else None
    last = valid[-1] if valid and end else {}
    mean_change, largest_change = loss_changes(train, settled)
    result = found if end else None
    return Figures(
        finished=end is not None,
        updates=updates,
        parameters=begin["parameters"] if begin else None,
        pairs=encoded["pairs"] if encoded else None,
        validations=tuple((r["step"], r["bleu"]) for r in valid),
        greedy=last.get("bleu"),
        nats_per_token=last.get("nll"),
        bits_per_character=_bits_per_character(records, last, characters),
        candidates={_kind(c["name"]): c["scores"] for c in result["candidates"]} if result else {},
        best=_kind(result["best"]) if result else None,
        seconds=seconds,
        pairs_per_second=updates * batch / seconds if seconds and batch else None,
        mean_change=mean_change,
        largest_change=largest_change,
        high_norms=high_norms(train),
        how=_how(last, result),
    )


def loss_changes(train: Sequence[Record], settled: int) -> tuple[float | None, float | None]:
    """Mean and largest absolute change of the loss between neighbouring updates after `settled`.

    In percent of the mean loss of those updates, so that vocabularies compare; the loss is `nll`,
    without smoothing and R-Drop, so that those compare too.
    """
    after = [(r["step"], float(r["nll"])) for r in train if r["step"] > settled]
    changes = [abs(b - a) for (i, a), (j, b) in pairwise(after) if j == i + 1]
    if not changes:
        return None, None
    unit = statistics.fmean(value for _, value in after) / 100.0
    return statistics.fmean(changes) / unit, max(changes) / unit


def high_norms(train: Sequence[Record]) -> int | None:
    """How many gradient norms, before clipping, are above HIGH x the median of all."""
    norms = [float(r["grad_norm"]) for r in train]
    if not norms:
        return None
    limit = HIGH * statistics.median(norms)
    return sum(norm > limit for norm in norms)


def _bits_per_character(records: Sequence[Record], valid: Record, characters: int) -> float | None:
    """None where the likelihood leaves out pairs (blank or too long) that were counted."""
    if "nll" not in valid or characters == 0:
        return None
    corpus = _last(records, "corpus") or {"splits": []}
    text = next((s for s in corpus["splits"] if s["split"] == "validation"), None)
    if text is None or text["kept"] < text["pairs"]:
        return None
    return float(valid["nll"]) * int(valid["target_tokens"]) / math.log(2.0) / characters


def _kind(name: str) -> str:
    return SINGLE if name.startswith("step-") else name


def _how(valid: Record, found: Record | None) -> str:
    """How BLEU was made: its signature, and the search behind the result."""
    if found is None or not valid:
        return ""
    search = f"beam {found['beam']}, length penalty {found['length_penalty']:g}"
    return f"{search}; {valid['signatures'][0]}"


def _all(records: Sequence[Record], kind: str) -> list[Record]:
    return [record for record in records if record["kind"] == kind]


def _last(records: Sequence[Record], kind: str) -> Record | None:
    return next((record for record in reversed(records) if record["kind"] == kind), None)


# ---- tables -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One line of the tables: a variant, how it stands, its runs (of the base one a seed)."""

    name: str
    status: str  # empty when all is well
    runs: Sequence[Figures]

    @property
    def label(self) -> str:
        return f"{self.name} ({self.status})" if self.status else self.name

    def values(self, of: Callable[[Figures], float | None]) -> list[float]:
        """The figures that are known."""
        return [value for value in map(of, self.runs) if value is not None]

    def mean(self, of: Callable[[Figures], float | None]) -> float | None:
        values = self.values(of)
        return statistics.fmean(values) if values else None

    def deviation(self, of: Callable[[Figures], float | None]) -> float | None:
        """Standard deviation of one run, from the sample; None below two runs."""
        values = self.values(of)
        return statistics.stdev(values) if len(values) > 1 else None


def quality(base: Row, others: Iterable[Row]) -> str:
    """Scores and likelihoods, and how far each variant is from the mean of the base."""
    center, spread = base.mean(_bleu), base.deviation(_bleu)
    rows = []
    for row in (base, *others):
        bleu = row.mean(_bleu)
        far = None if row is base or bleu is None or center is None else bleu - center
        rows.append(
            [
                row.label,
                _whole(row.mean(lambda f: f.parameters)),
                _spread(row, lambda f: f.greedy),
                _spread(row, _bleu),
                _text(row.mean(lambda f: f.chrf), ".2f"),
                _text(far, "+.2f"),
                _text(far / spread if far is not None and spread else None, "+.1f"),
                _text(row.mean(lambda f: f.nats_per_token), ".3f"),
                _text(row.mean(lambda f: f.bits_per_character), ".4f"),
                " / ".join(_soon(row, bleu) for bleu in BLEUS),
            ]
        )
    head = ["variant", "parameters", "BLEU, greedy", "BLEU", "chrF", "to base", "in SD"]
    head += ["nats/token", "bits/character", f"updates to {' / '.join(f'{b:g}' for b in BLEUS)}"]
    how = next((f.how for row in (base, *others) for f in row.runs if f.how), "")
    title = f"Quality on the validation set{f' (BLEU: {how})' if how else ''}"
    return table(title, head, rows)


def steadiness(base: Row, others: Iterable[Row]) -> str:
    """What a variant costs, and how smoothly it trains."""
    rows = [
        [
            row.label,
            _whole(row.mean(lambda f: f.updates)),
            _whole(row.mean(lambda f: f.seconds)),
            figure(row.mean(lambda f: f.pairs_per_second)),
            _text(row.mean(lambda f: f.mean_change), ".2f"),
            _text(row.mean(lambda f: f.largest_change), ".1f"),
            _text(row.mean(lambda f: f.high_norms), ".3g"),
        ]
        for row in (base, *others)
    ]
    head = ["variant", "updates", "seconds", "pairs/s", "loss changes by, %", "at most, %"]
    return table("Cost and steadiness", [*head, f"norms above {HIGH:g} medians"], rows)


def averages(named: Mapping[str, Figures]) -> str:
    """What means of the weights score beside the best checkpoint of the same run: BLEU."""
    kinds = (SINGLE, *MEANS)
    rows: list[list[str]] = []
    gains: dict[str, list[float]] = {kind: [] for kind in MEANS}
    for name, run in named.items():
        bleu = {kind: run.candidates[kind]["bleu"] for kind in kinds if kind in run.candidates}
        for kind in MEANS:
            if kind in bleu and SINGLE in bleu:
                gains[kind].append(bleu[kind] - bleu[SINGLE])
        rows.append([name, *(_text(bleu.get(kind), ".2f") for kind in kinds)])
    means = [statistics.fmean(values) if values else None for values in gains.values()]
    rows.append(["mean difference", "", *(_text(mean, "+.2f") for mean in means)])
    head = ["run", "best checkpoint", *MEANS.values()]
    return table("BLEU of means of the weights, each of the same run", head, rows)


def _bleu(run: Figures) -> float | None:
    return run.bleu


def _spread(row: Row, of: Callable[[Figures], float | None]) -> str:
    """The mean, and the standard deviation of one run where several are known."""
    deviation = row.deviation(of)
    text = _text(row.mean(of), ".2f")
    return text if deviation is None else f"{text} ± {deviation:.2f}"


def _soon(row: Row, bleu: float) -> str:
    """Mean of the updates until this BLEU; "-" unless every run has reached it."""
    steps = row.values(lambda run: run.reached(bleu))
    return _whole(statistics.fmean(steps)) if steps and len(steps) == len(row.runs) else "-"


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{round(value):,}"
