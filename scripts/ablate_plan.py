"""What an ablation trains: the variants, as data, and the runs that a call makes of them.

A variant is a line of VARIANTS: its name, its group, and the `--set` values that make it. What its
group asks stands in CLAIMS. Names and settings are checked here, and nothing is trained; torch is
not needed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ablate_table import Figures, read_figures
from bench_setup import last_line

from mttrain.config import RunConfig, changed_keys, load_config
from mttrain.errors import MttrainError
from mttrain.pairs import parallel_text
from mttrain.rundir import LOG
from mttrain.runlog import read_log

VALIDATIONS = 10  # of a run, evenly spread
AVERAGE = 3  # checkpoints of the mean at the end: the last 30 % of the updates
PAPER_WARMUP = 4000  # updates (Vaswani et al. 2017, section 5.3)
BASE = "base"
# Settings that change no figure but the seconds.
FREE = {"run_dir", "threads", "data.cache_dir", "data.workers", "train.device"}

CLAIMS = {
    BASE: "the same settings under other seeds: how large is chance?",
    "heads": "several heads beat one of the same total width (Vaswani et al. 2017, table 3 A)",
    "vocabulary": "subwords beat characters and huge vocabularies (Sennrich et al. 2016)",
    "warmup": "without a warm-up training is unstable (Popel & Bojar 2018)",
    "smoothing": "label smoothing hurts likelihood and helps BLEU (Vaswani et al. 2017, 5.4)",
    "scale": "sqrt(d) before positions, 1/sqrt(d_k) in the softmax are needed (the same, 3.2, 3.4)",
    "tie": "one matrix for all embeddings costs no quality (Press & Wolf 2017)",
    "norm": "norms before the blocks need no warm-up, after them they do (Xiong et al. 2020)",
    "positions": "learned positions are as good as sinusoids (Vaswani et al. 2017, table 3 E)",
    "bpe-dropout": "several segmentations of a word regularise (Provilkov et al. 2020)",
    "rdrop": "two passes that must agree regularise (Liang et al. 2021)",
    "word-dropout": "dropping whole words regularises (Gal & Ghahramani 2016)",
    "dropout": "little text needs more dropout than 0.1 (Sennrich & Zhang 2019)",
    "weight-decay": "decoupled weight decay regularises (Loshchilov & Hutter 2019)",
}


@dataclass(frozen=True)
class Variant:
    """One change to the configuration: `--set` values, with {fields} from `derived`."""

    name: str
    group: str  # one of CLAIMS
    settings: tuple[str, ...]


def _variant(name: str, group: str, settings: str) -> Variant:
    return Variant(name, group, tuple(settings.split()))


_CHARACTER = "tokenizer.level=character tokenizer.vocab_size=2000 tokenizer.dropout=0"
_PAPER = "optim.schedule=inverse_sqrt optim.lr={paper_rate} optim.warmup_steps={paper_warmup}"
_SINUSOIDAL = "model.positions=sinusoidal model.max_positions=null"
_LEARNED = "model.positions=learned model.max_positions={positions}"

# Both ends of a comparison stand here: the one that the configuration has is the base.
VARIANTS = (
    _variant("heads-1", "heads", "model.num_heads=1"),
    _variant("heads-4", "heads", "model.num_heads=4"),
    _variant("heads-8", "heads", "model.num_heads=8"),
    _variant("characters", "vocabulary", f"{_CHARACTER} data.max_length={{characters}}"),
    _variant("bpe-2k", "vocabulary", "tokenizer.level=subword tokenizer.vocab_size=2000"),
    _variant("bpe-6k", "vocabulary", "tokenizer.level=subword tokenizer.vocab_size=6000"),
    _variant("bpe-10k", "vocabulary", "tokenizer.level=subword tokenizer.vocab_size=10000"),
    _variant("no-warmup", "warmup", "optim.warmup_steps=0"),
    _variant("smoothing-0", "smoothing", "optim.label_smoothing=0"),
    _variant("smoothing-0.1", "smoothing", "optim.label_smoothing=0.1"),
    _variant("embedding-scaled", "scale", "model.scale_embedding=true"),
    _variant("embedding-unscaled", "scale", "model.scale_embedding=false"),
    _variant("attention-scaled", "scale", "model.scale_attention=true"),
    _variant("attention-unscaled", "scale", "model.scale_attention=false"),
    _variant("tie-all", "tie", "model.tie=all"),
    _variant("tie-target", "tie", "model.tie=target"),
    _variant("tie-none", "tie", "model.tie=none"),
    _variant("norm-pre", "norm", "model.norm=pre"),
    _variant("norm-pre-paper", "norm", f"model.norm=pre {_PAPER}"),
    _variant("norm-post", "norm", "model.norm=post"),
    _variant("norm-post-paper", "norm", f"model.norm=post {_PAPER}"),
    _variant("norm-post-no-warmup", "norm", "model.norm=post optim.warmup_steps=0"),
    _variant("sinusoidal", "positions", _SINUSOIDAL),
    _variant("learned", "positions", _LEARNED),
    _variant("bpe-dropout-0", "bpe-dropout", "tokenizer.dropout=0"),
    _variant("bpe-dropout-0.1", "bpe-dropout", "tokenizer.dropout=0.1"),
    _variant("rdrop-0", "rdrop", "optim.rdrop=0"),
    _variant("rdrop-5", "rdrop", "optim.rdrop=5"),
    _variant("word-dropout-0", "word-dropout", "model.word_dropout=0"),
    _variant("word-dropout-0.1", "word-dropout", "model.word_dropout=0.1"),
    _variant("dropout-0.1", "dropout", "model.dropout=0.1"),
    _variant("dropout-0.2", "dropout", "model.dropout=0.2"),
    _variant("dropout-0.3", "dropout", "model.dropout=0.3"),
    _variant("weight-decay-0", "weight-decay", "optim.weight_decay=0"),
    _variant("weight-decay-0.01", "weight-decay", "optim.weight_decay=0.01"),
    _variant("weight-decay-0.1", "weight-decay", "optim.weight_decay=0.1"),
)


class AblationError(Exception):
    """What the user must mend, in one or two sentences."""


# ---- the plan ---------------------------------------------------------------------------------


def common(arguments: argparse.Namespace) -> list[str]:
    """`--set` values of every run: the length of training, and how it is judged."""
    steps: int = arguments.steps
    return [
        f"data.cache_dir={json.dumps(str(arguments.runs / 'cache'), ensure_ascii=False)}",
        "data.test=null",
        "threads=null",
        f"train.max_steps={steps}",
        *(f"train.{name}=null" for name in ("max_epochs", "max_time", "patience", "batch_tokens")),
        f"train.batch_size={arguments.batch_size}",
        "train.accumulate=1",
        f"train.valid_every={max(1, steps // VALIDATIONS)}",
        "train.valid_beam=1",
        "train.log_every=1",
        "train.best_metric=bleu",
        f"train.keep_last={AVERAGE}",
        f"train.average={AVERAGE}",
        "train.average_of=last",
        # Mean over about the last tenth of the updates. It changes no update, and no other score.
        f"train.ema={max(0.5, 1.0 - VALIDATIONS / steps):.6g}",
        *arguments.set,
    ]


def derived(base: RunConfig) -> dict[str, str]:
    """Values of variants that depend on the base."""
    longest = base.data.max_length
    rate = base.model.d_model**-0.5 * PAPER_WARMUP**-0.5  # equation 3 at its peak
    return {
        "characters": str(8 * longest),  # so that no pair is skipped that subwords keep
        "positions": str(max(longest, base.decode.max_length or 0)),
        "paper_rate": f"{rate:.4g}",
        "paper_warmup": str(PAPER_WARMUP),
    }


@dataclass(frozen=True)
class Run:
    """One training run: its folder, and the `--set` values that make it."""

    name: str
    group: str
    folder: Path
    settings: tuple[str, ...]
    config: RunConfig

    @property
    def talk(self) -> Path:
        """What it said on stderr, all starts."""
        return self.folder.with_name(f"{self.name}.txt")

    def records(self) -> list[dict[str, Any]]:
        """Its log so far."""
        path = self.folder / LOG
        return read_log(path) if path.exists() else []

    def diverged(self) -> bool:
        """Whether it ended without a result, and would do so again."""
        said = self.talk.read_text("utf-8", "replace") if self.talk.exists() else ""
        return "training diverged" in last_line(said)

    def status(self, figures: Figures) -> str:
        """Empty for a finished run."""
        if figures.finished:
            return ""
        how = "diverged" if self.diverged() else "not finished"
        return f"{how}, update {figures.updates}" if figures.updates else "not begun"


class Plan:
    """All runs of a call. base: one for each seed; others: the variants; same: those that the base
    is; refused: those that the configuration does not allow, and why."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.common = common(arguments)
        first = self._run(BASE, BASE, ())
        if first.config.train.init_from is not None:
            raise AblationError(
                f"{arguments.config}: train.init_from brings the model and vocabulary of another "
                "run, which the variants would change; set it to null."
            )
        seed = first.config.seed
        self.base = [
            self._run(f"{BASE}-{number}", BASE, (f"seed={number}",))
            for number in range(seed, seed + arguments.seeds)
        ]
        self.others: list[Run] = []
        self.same: list[str] = []
        self.refused: dict[str, str] = {}
        values = derived(first.config)
        for variant in chosen(arguments.only):
            settings = tuple(text.format_map(values) for text in variant.settings)
            try:
                run = self._run(variant.name, variant.group, settings)
            except MttrainError as error:
                self.refused[variant.name] = " ".join(str(error).split())
                continue
            if changed_keys(first.config, run.config).keys() <= {"run_dir"}:
                self.same.append(variant.name)
            else:
                self.others.append(run)
        self._check_folders()
        text = parallel_text(first.config.data.valid, first.config.data)
        self.characters = sum(len(pair.target) for pair in text.required_pairs())
        self.settled = first.config.optim.warmup_steps

    def _run(self, name: str, group: str, settings: tuple[str, ...]) -> Run:
        folder = self.arguments.runs / name
        place = f"run_dir={json.dumps(str(folder), ensure_ascii=False)}"
        every = (*self.common, *settings, place)
        return Run(name, group, folder, every, load_config(self.arguments.config, every))

    def _check_folders(self) -> None:
        """Refuse to go on with, or to show, what other settings have made."""
        for run in self.runs:
            path = run.folder / "config.yaml"
            keys = changed_keys(load_config(path), run.config) if path.exists() else {}
            changed = [f"{key} {keys[key][0]}" for key in keys if key not in FREE]
            if changed:
                raise AblationError(
                    f"{run.folder} was made with other settings: {', '.join(changed[:5])}. Give "
                    "the same options again, or another folder with --runs."
                )

    @property
    def runs(self) -> list[Run]:
        """All, in the order in which they are trained."""
        return [*self.base, *self.others]

    def figures(self, run: Run) -> Figures:
        return read_figures(run.records(), self.characters, self.settled)


def chosen(only: Sequence[str]) -> list[Variant]:
    """The variants of these names and groups; all of them for none. AblationError: unknown."""
    known = {*CLAIMS, *(variant.name for variant in VARIANTS)}
    unknown = [word for word in only if word not in known]
    if unknown:
        raise AblationError(
            f"--only: no variant or group {', '.join(unknown)}. Groups: {', '.join(CLAIMS)}; "
            "--list shows the variants."
        )
    return [v for v in VARIANTS if not only or v.name in only or v.group in only]
