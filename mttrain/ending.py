"""After the last update: which weights are the result, and what they score.

Candidates are the best single checkpoint, the means of the last and of the best checkpoints
(`train.average`, `train.average_of`; Vaswani et al. 2017, section 6.1), and the running mean of all
updates (`train.ema`). All are scored on the validation set with the decode settings; the best is
kept under its own name and named in the index, of equal ones the first. The test set is scored
once, with that one.

Rank 0 finds, reads and averages; the others take its weights, since on a shared file system they
may see other files, or later.

Price: one validation for each candidate, and reading the checkpoints of each mean.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mttrain.checkpoint import (
    Index,
    Tokenizers,
    average_checkpoints,
    checkpoint_names,
    load_model,
    read_index,
    save_checkpoint,
    write_index,
)
from mttrain.config import RunConfig, TrainConfig
from mttrain.dataset import TranslationDataset
from mttrain.distributed import World
from mttrain.metrics import Score
from mttrain.model import Transformer
from mttrain.rundir import LOWER_IS_BETTER, remove_whole
from mttrain.runlog import RunLog
from mttrain.validation import Evaluation, Validator

LAST, BEST, EMA = "average", "average-best", "ema"
# Checkpoints that the end of a run makes, and what they are.
MADE = {
    LAST: "mean of the last {} checkpoints",
    BEST: "mean of the best {} checkpoints",
    EMA: "running mean of the weights",
}


@dataclass(frozen=True)
class Candidate:
    """Weights that may be the result; `checkpoints` are those of a mean."""

    name: str
    checkpoints: tuple[str, ...]
    weights: Callable[[], Mapping[str, Tensor]]

    @property
    def what(self) -> str:
        """What it is, for people."""
        return MADE.get(self.name, self.name).format(len(self.checkpoints))


def validated(run_dir: Path, index: Index) -> list[str]:
    """Names of the checkpoints that have scores, oldest first."""
    return [name for name in checkpoint_names(run_dir) if index.scores.get(name)]


def averaged_best(index: Index, train: TrainConfig) -> list[str]:
    """Names of the best checkpoints that the end of the run averages, best first."""
    if train.average_of == "last":
        return []
    return _singles(index)[: train.average]


def _singles(index: Index) -> list[str]:
    """Names of the checkpoints that training itself made, best first."""
    return [name for name in index.ranked() if name not in MADE]


def candidates(
    run_dir: Path, index: Index, train: TrainConfig, ema: Mapping[str, Tensor] | None
) -> list[Candidate]:
    """What may be the result of a run; the best single checkpoint comes first."""
    folder = run_dir / "checkpoints"

    def mean(name: str, members: list[str]) -> Candidate:
        paths = [folder / member for member in members]
        return Candidate(name, tuple(members), lambda: average_checkpoints(paths))

    singles = _singles(index)
    first = singles[0] if singles else index.last
    assert first is not None  # training ends with a validation, and so with a checkpoint
    found = [mean(first, [first])]
    last = validated(run_dir, index)[-train.average :] if train.average else []
    best = averaged_best(index, train)
    if train.average_of != "best" and len(last) > 1:
        found.append(mean(LAST, last))
    if len(best) > 1 and not (len(found) > 1 and set(best) == set(last)):
        found.append(mean(BEST, best))
    if ema is not None:
        found.append(Candidate(EMA, (), lambda: ema))
    return found


@dataclass
class Ending:
    """Chooses and tests. model: it is given other weights; meta: of a checkpoint with these scores;
    step: updates done."""

    config: RunConfig
    world: World
    log: RunLog
    model: Transformer
    tokenizers: Tokenizers
    validator: Validator
    valid_set: TranslationDataset
    step: int
    meta: Callable[[dict[str, float]], dict[str, Any]]

    def __post_init__(self) -> None:
        self.run_dir = Path(self.config.run_dir)
        self.metric = self.config.train.best_metric

    def choose(self, ema: Mapping[str, Tensor] | None) -> str:
        """Score all candidates and keep the best one; returns the name of its checkpoint."""
        choices = self._choices(ema)
        best = choices[0]
        if len(choices) > 1:
            found = [self._score(choice) for choice in choices]
            sign = -1.0 if self.metric in LOWER_IS_BETTER else 1.0
            values = [sign * evaluation.values[self.metric] for evaluation in found]
            chosen = max(range(len(choices)), key=values.__getitem__)
            best = choices[chosen]
            self._record(choices, found, best.name)
            self._keep(best, found[chosen].values)
        else:
            self._forget_others(best.name)
        return best.name

    def _choices(self, ema: Mapping[str, Tensor] | None) -> list[Candidate]:
        """The candidates of rank 0, on every rank; only there they have weights."""
        found: list[Candidate] = []
        if self.world.is_main:
            found = candidates(self.run_dir, read_index(self.run_dir), self.config.train, ema)
        told = [json.dumps((choice.name, choice.checkpoints)) for choice in found]
        known = map(json.loads, self.world.gather_texts(told)[0])
        return found or [Candidate(name, tuple(members), dict) for name, members in known]

    def _take(self, weights: Callable[[], Mapping[str, Tensor]]) -> None:
        """Give the model, on every rank, the weights that rank 0 has."""
        made = weights() if self.world.is_main else {}
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                value = torch.empty_like(parameter, device="cpu")
                parameter.copy_(self.world.from_main(value.copy_(made[name]) if made else value))

    def _score(self, choice: Candidate) -> Evaluation:
        """With the decode settings, to the end; the model then has these weights."""
        self._take(choice.weights)
        beam = self.config.decode.beam
        found = self.validator.evaluate(self.model, self.valid_set, beam)
        assert found is not None
        self.log.say(f"validation with beam {beam}: {choice.what}: {found.text()}")
        return found

    def _record(self, choices: list[Candidate], found: list[Evaluation], best: str) -> None:
        decode = self.config.decode
        scored = [
            {"name": choice.name, "checkpoints": choice.checkpoints, "scores": evaluation.values}
            for choice, evaluation in zip(choices, found, strict=True)
        ]
        self.log.event(
            "candidates",
            step=self.step,
            beam=decode.beam,
            length_penalty=decode.length_penalty,
            candidates=scored,
            best=best,
        )

    def _keep(self, best: Candidate, scores: dict[str, float]) -> None:
        """Save what is no checkpoint yet, and name it in the index."""
        if self.world.is_main:
            if best.name in MADE:
                save_checkpoint(
                    self.run_dir, self.step, self.model, self.meta(scores), self.tokenizers, None,
                    name=best.name, weights=best.weights(),
                )  # fmt: skip
            index = read_index(self.run_dir)
            kept = {name: values for name, values in index.scores.items() if name not in MADE}
            if best.name in MADE:
                kept[best.name] = scores
            write_index(self.run_dir, replace(index, scores=kept, best=best.name))
        self._forget_others(best.name)

    def _forget_others(self, best: str) -> None:
        """Remove what an earlier end of this run had made."""
        folder = self.run_dir / "checkpoints"
        for name in MADE if self.world.is_main else ():
            if name != best and (folder / name).exists():
                remove_whole(folder / name)
        self.world.barrier()

    def test(self, best: str, text: tuple[list[str], list[str]]) -> list[Score]:
        """Translate and score the test set with the best checkpoint and the decode settings."""
        folder = self.run_dir / "checkpoints" / best
        self._take(lambda: dict(load_model(folder).model.named_parameters()))
        corpus = self.config.data.test
        assert corpus is not None, "there is a text of it"
        validator = Validator(self.config, self.tokenizers, corpus, text, self.world)
        decode = self.config.decode
        texts = validator.translate(self.model, decode.beam)
        assert texts is not None
        scores = validator.score(texts, ("bleu", "chrf", "ter"))
        self.log.say(f"translated the test set with {best}, beam {decode.beam}; scores come last")
        self.log.event(
            "test",
            step=self.step,
            checkpoint=best,
            beam=decode.beam,
            length_penalty=decode.length_penalty,
            scores=[score.to_dict() for score in scores],
        )
        return scores
