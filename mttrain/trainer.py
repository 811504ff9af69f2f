"""From a configuration to a finished run: directory, vocabulary, encoded text, model, loop, ending.

`train` builds the parts and hands them to `loop.Trainer`; after the last update it averages
checkpoints, keeps the average when it scores better on the validation set, and scores the test set
once. A run directory that exists is resumed when the configuration allows it (`runsetup` has the
rules).
"""

from __future__ import annotations

import math
import signal
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from mttrain.check import check_corpus
from mttrain.checkpoint import (
    Index,
    Tokenizers,
    average_checkpoints,
    checkpoint_names,
    load_model,
    load_train_state,
    newest_good,
    prune,
    read_index,
    save_checkpoint,
    write_index,
)
from mttrain.config import RunConfig
from mttrain.dataset import TranslationDataset, encode_corpus, load_raw
from mttrain.distributed import World, close_world, init_world
from mttrain.errors import CheckpointError
from mttrain.loop import Trainer, epoch_plan
from mttrain.metrics import Score
from mttrain.model import Transformer
from mttrain.progress import Progress
from mttrain.rundir import LOWER_IS_BETTER
from mttrain.runlog import RunLog, read_log
from mttrain.runsetup import prepare_run_dir, tokenizers_of_run
from mttrain.validation import Validator

LOG = "log.jsonl"
AVERAGE = "average"
STATES_KEPT = 2  # newest checkpoints that keep their training state: the second is a reserve


@dataclass(frozen=True)
class TrainResult:
    """How a run ended. reason: max_steps, max_epochs, max_time, patience, SIGINT or SIGTERM;
    best: name of the best checkpoint; scores: of the test set, when there is one."""

    reason: str
    run_dir: Path
    best: str | None
    scores: list[Score] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0, or what a shell expects of a process ended by that signal."""
        interrupted = {"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM}.get(self.reason)
        return 128 + interrupted if interrupted else 0


def train(config: RunConfig, *, fresh: bool = False, dry_run: bool = False) -> TrainResult:
    """Train as the configuration says, from the start or from where the run directory stands.

    `fresh` removes an earlier run in the same directory first. `dry_run` checks the corpus and
    says what training would do, and leaves no file. Raises ConfigError, DataError, CheckpointError
    and TrainingError.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if dry_run:
        with tempfile.TemporaryDirectory() as folder:
            data = config.data.model_copy(update={"cache_dir": None})
            config = config.model_copy(update={"run_dir": folder, "data": data})
            return Run(config, World(0, 1, torch.device("cpu")), RunLog(None)).rehearse()
    world = init_world(config.train.device)
    try:
        changes = prepare_run_dir(config, fresh=fresh) if world.is_main else []
        world.barrier()
        path = Path(config.run_dir) / LOG if world.is_main else None
        return Run(config, world, RunLog(path, quiet=not world.is_main), changes).run()
    finally:
        close_world(world)


class Run:
    """One run: its parts, and what happens around the loop."""

    def __init__(
        self, config: RunConfig, world: World, log: RunLog, changes: Sequence[str] = ()
    ) -> None:
        self.config, self.world, self.log, self.changes = config, world, log, changes
        self.run_dir = Path(config.run_dir)
        self.scores: dict[str, float] = {}
        self.metric = config.train.best_metric
        self._sign = -1.0 if self.metric in LOWER_IS_BETTER else 1.0

    def run(self) -> TrainResult:
        """Build, resume, train, end."""
        finished = self._already_finished()
        if finished is not None:
            return finished
        self.tokenizers: Tokenizers = tokenizers_of_run(self.config, self.world, self.log)
        self._load_text()
        self.model = self._new_model()
        trainer = Trainer(
            self.config,
            self.model,
            self.dataset,
            self.world,
            self.log,
            on_validate=self._validate,
            on_save=self._save,
        )
        self.trainer = trainer
        self._resume_or_begin()
        reason = trainer.run()
        if reason in ("SIGINT", "SIGTERM"):
            self._say(
                f"stopped by {reason} after update {trainer.progress.update}; the state is saved "
                "and the same command goes on from here"
            )
            return TrainResult(reason, self.run_dir, read_index(self.run_dir).best)
        return self._finish(reason)

    def rehearse(self) -> TrainResult:
        """Say what training would work on: pairs, sizes, batches, padding."""
        self.tokenizers = tokenizers_of_run(self.config, self.world, self.log)
        self._load_text()
        self.model = self._new_model()
        self._say_sizes()
        plan = epoch_plan(self.config, self.dataset, 0)
        per_update = self.config.train.accumulate
        self._say(
            f"{len(plan)} batches an epoch, {-(-len(plan) // per_update)} updates; "
            f"{int(plan.target_tokens.sum()):,} target tokens; {100 * plan.padding:.1f} % padding"
        )
        return TrainResult("dry_run", self.run_dir, None)

    # ---- building ----------------------------------------------------------------------------

    def _already_finished(self) -> TrainResult | None:
        """The result of a run that has nothing left to do; no file is touched."""
        path = self.run_dir / LOG
        ends = [r for r in read_log(path) if r["kind"] == "end"] if path.exists() else []
        if not ends or not _limit_reached(self.config, ends[-1]):
            return None
        ended = ends[-1]
        self._say(
            f"{self.run_dir} is finished ({ended['reason']} after {ended['step']} updates; best: "
            f"{ended['best']}); raise the limit to go on, or use --fresh to start again"
        )
        return TrainResult(ended["reason"], self.run_dir, ended["best"])

    def _load_text(self) -> None:
        """Encode the corpora (rank 0 first: the others map its files) and read the raw text."""
        data = self.config.data
        self.valid_text = load_raw(data.valid)
        self.test_text = load_raw(data.test) if data.test is not None else None
        if self.world.is_main:
            if newest_good(self.run_dir) is None:
                report = check_corpus(data, self.tokenizers)
                self.log.event("corpus", **report.to_dict())
                self._say(report.text())
            self._encode()
        self.world.barrier()
        self.dataset, self.valid_set = self._encode()
        self.validator = Validator(self.config, self.tokenizers, self.valid_text, self.world)

    def _encode(self) -> tuple[TranslationDataset, TranslationDataset]:
        directory = Path(self.config.data.cache_dir or self.run_dir / "data")
        train, valid = (
            TranslationDataset(encode_corpus(self.config.data, self.tokenizers, split, directory))
            for split in ("train", "valid")
        )
        return train, valid

    def _new_model(self) -> Transformer:
        torch.manual_seed(self.config.seed)
        source, target = self.tokenizers
        model = Transformer(self.config.model, source.size, target.size)
        return model.to(self.world.device)

    def _resume_or_begin(self) -> None:
        """Load the newest whole checkpoint, or begin at update 0."""
        folder = newest_good(self.run_dir, self._warn)
        if folder is None:
            self.log.event(
                "begin",
                step=0,
                parameters=self.model.parameter_count(),
                device=str(self.world.device),
                ranks=self.world.size,
                threads=torch.get_num_threads(),
                config=self.config.model_dump(mode="json"),
            )
            self._say_sizes()
            return
        bundle = load_model(folder, self.world.device)
        self._check_same_text(bundle.meta, folder)
        self._load_weights(dict(bundle.model.named_parameters()))
        self.trainer.restore(load_train_state(folder))
        progress = self.trainer.progress
        if self.world.is_main:
            self._forget_later(progress.update)
            self.log.truncate_after(progress.update)
        self.log.event("resume", step=progress.update, changes=list(self.changes))
        for change in self.changes:
            self._say(f"changed: {change}")
        self._say(f"resuming after update {progress.update} (epoch {progress.epoch + 1})")

    def _check_same_text(self, meta: dict[str, Any], folder: Path) -> None:
        if meta.get("train_text") != self._text_hashes():
            raise CheckpointError(
                f"{folder}: the training text has changed since this run began. Put the old files "
                "back, or start again with --fresh."
            )

    def _text_hashes(self) -> list[list[str]]:
        """SHA-256 of the source and target text of each training corpus."""
        return [corpus["sha256"] for corpus in self.dataset.store.index["corpora"]]

    def _forget_later(self, update: int) -> None:
        """Drop from the index what is not on the way to `update`: damaged or averaged models."""
        index = read_index(self.run_dir)
        names = {name for name in checkpoint_names(self.run_dir) if _step_of(name) <= update}
        scores = {name: values for name, values in index.scores.items() if name in names}
        kept = replace(index, scores=scores, last=f"step-{update:08d}")
        write_index(self.run_dir, replace(kept, best=next(iter(kept.ranked()), None)))

    # ---- during training ---------------------------------------------------------------------

    def _validate(self, progress: Progress) -> float:
        """Scores of the running model; returns what chooses the best, higher is better."""
        train = self.config.train
        found = self.validator.evaluate(
            self.model, self.valid_set, train.valid_beam, self._interrupted
        )
        if self._interrupted():
            return math.nan
        self.scores = found.values
        self.log.event(
            "valid",
            step=progress.update,
            epoch=progress.epoch,
            beam=train.valid_beam,
            length_penalty=self.config.decode.length_penalty,
            **found.record(),
            samples=self.validator.samples(found.texts, train.valid_samples),
        )
        self._say(f"update {progress.update}: {found.text()}")
        return self._sign * self.scores[self.metric]

    def _interrupted(self) -> bool:
        return bool(self.trainer.interrupt.signal)

    def _save(self, progress: Progress, improved: bool) -> None:
        """Checkpoint, index, and removal of what is no longer kept; rank 0 only."""
        validated = progress.validated == progress.update
        if self.world.is_main:
            scores = self.scores if validated else {}
            path = save_checkpoint(
                self.run_dir,
                progress.update,
                self.model,
                self._meta(scores),
                self.tokenizers,
                self.trainer.state(),
            )
            index = read_index(self.run_dir)
            if index.metric != self.metric:
                index = Index(metric=self.metric, scores=index.scores)
            index = index.added(path.name, scores)
            self._keep(index)
            if improved:
                self.log.event("best", step=progress.update, checkpoint=path.name, **scores)
        self.world.barrier()

    def _meta(self, scores: dict[str, float]) -> dict[str, Any]:
        data = self.config.data
        return {
            "source_lang": data.source_lang,
            "target_lang": data.target_lang,
            "max_length": data.max_length,
            "train_text": self._text_hashes(),
            "decode": self.config.decode.model_dump(mode="json"),
            "scores": scores,
        }

    def _keep(self, index: Index) -> None:
        """Write the index and remove checkpoints that are neither new, nor best, nor averaged."""
        train = self.config.train
        names = checkpoint_names(self.run_dir)
        validated = [name for name in names if index.scores.get(name)]
        keep = {*validated[-train.keep_last :], names[-1]}
        if index.best is not None:
            keep.add(index.best)
        if train.average_of == "best":
            keep |= set(index.ranked()[: train.average])
        scores = {name: values for name, values in index.scores.items() if name in keep}
        # The index goes first: it never names a checkpoint that is gone.
        write_index(self.run_dir, replace(index, scores=scores))
        prune(self.run_dir, keep, keep_state=names[-STATES_KEPT:])

    # ---- the end -----------------------------------------------------------------------------

    def _finish(self, reason: str) -> TrainResult:
        """Average, choose, score the test set once, write the closing record."""
        progress = self.trainer.progress
        self._say(f"training ended by {reason} after update {progress.update}")
        best = self._choose_best()
        scores = self._test(best)
        self.log.event(
            "end",
            step=progress.update,
            epoch=progress.epoch,
            reason=reason,
            best=best,
            seconds=round(progress.seconds, 1),
            left_out=progress.left_out,
            bad_validations=progress.bad_validations,
        )
        self._say(f"the best checkpoint is {best} in {self.run_dir / 'checkpoints'}")
        return TrainResult(reason, self.run_dir, best, scores)

    def _choose_best(self) -> str:
        """Name of the best checkpoint, or of the average when that scores better."""
        index = read_index(self.run_dir)
        best = index.best or index.last
        assert best is not None  # training ends with a validation, and so with a checkpoint
        chosen = self._averaged_names(index)
        if len(chosen) < 2:
            return best
        beam = self.config.decode.beam
        folder = self.run_dir / "checkpoints"
        single_model = load_model(folder / best, self.world.device).model
        single = self.validator.evaluate(single_model, self.valid_set, beam)
        self._load_weights(average_checkpoints([folder / name for name in chosen]))
        mean = self.validator.evaluate(self.model, self.valid_set, beam)
        better = self._sign * mean.values[self.metric] > self._sign * single.values[self.metric]
        self.log.event(
            "average",
            step=self.trainer.progress.update,
            checkpoints=chosen,
            beam=beam,
            scores=mean.values,
            best_single=best,
            best_single_scores=single.values,
            kept=better,
        )
        self._say(f"validation with beam {beam}: {best}: {single.text()}")
        verdict = "kept" if better else "not better, not kept"
        self._say(f"average of {len(chosen)} checkpoints: {mean.text()} ({verdict})")
        return self._keep_average(mean.values) if better else best

    def _load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(weights[name])

    def _averaged_names(self, index: Index) -> list[str]:
        train = self.config.train
        if train.average == 0:
            return []
        if train.average_of == "best":
            return index.ranked()[: train.average]
        validated = [name for name in checkpoint_names(self.run_dir) if index.scores.get(name)]
        return validated[-train.average :]

    def _keep_average(self, values: dict[str, float]) -> str:
        if self.world.is_main:
            save_checkpoint(
                self.run_dir,
                self.trainer.progress.update,
                self.model,
                self._meta(values),
                self.tokenizers,
                None,
                name=AVERAGE,
            )
            index = read_index(self.run_dir)
            scores = {**index.scores, AVERAGE: values}
            write_index(self.run_dir, replace(index, scores=scores, best=AVERAGE))
        self.world.barrier()
        return AVERAGE

    def _test(self, best: str) -> list[Score]:
        """Translate and score the test set with the best model and the decode settings."""
        if self.test_text is None:
            return []
        model = load_model(self.run_dir / "checkpoints" / best, self.world.device).model
        validator = Validator(self.config, self.tokenizers, self.test_text, self.world)
        decode = self.config.decode
        texts = validator.translate(model, decode.beam)
        scores = validator.score(texts, ("bleu", "chrf", "ter"))
        self.log.event(
            "test",
            step=self.trainer.progress.update,
            checkpoint=best,
            beam=decode.beam,
            length_penalty=decode.length_penalty,
            scores=[score.to_dict() for score in scores],
        )
        return scores

    def _say_sizes(self) -> None:
        self._say(
            f"{self.model.parameter_count():,} parameters; vocabulary "
            f"{' + '.join(str(t.size) for t in dict.fromkeys(self.tokenizers))}; "
            f"{len(self.dataset):,} training pairs; {self.world.device}"
        )

    # ---- talking -----------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        if self.world.is_main:
            self.log.say(text)

    def _warn(self, text: str) -> None:
        self._say(f"warning: {text}")


def _step_of(name: str) -> int:
    return int(name.removeprefix("step-"))


def _limit_reached(config: RunConfig, ended: dict[str, Any]) -> bool:
    """True when a run that ended so has nothing to do under these settings."""
    train = config.train
    if train.max_steps is not None and ended["step"] >= train.max_steps:
        return True
    if train.max_epochs is not None and ended["epoch"] >= train.max_epochs:
        return True
    if train.max_seconds is not None and ended["seconds"] >= train.max_seconds:
        return True
    return train.patience is not None and ended["bad_validations"] >= train.patience
