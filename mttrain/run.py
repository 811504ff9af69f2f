"""One run: its parts, and what happens around the loop.

Builds vocabulary, encoded text, model and `loop.Trainer`; resumes from the newest whole checkpoint;
validates and saves when the loop asks for it. What happens after the last update is the affair of
`ending`.

Price beside training: at a new start a pass of the tokenizer over the text and a reading of it for
the report, at a resumed one the checksums of the encoded text.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mttrain.autobatch import resolve_batch_tokens
from mttrain.check import check_corpus
from mttrain.checkpoint import (
    Index,
    Tokenizers,
    check_tokenizers,
    checkpoint_names,
    copy_weights,
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
from mttrain.distributed import World, allow_tf32, training_type
from mttrain.ending import Ending, averaged_best, validated
from mttrain.errors import CheckpointError, TrainingError
from mttrain.loop import Trainer
from mttrain.machine import prepare_cpu
from mttrain.model import Transformer
from mttrain.origin import origin_model, origin_record, with_origin_tags
from mttrain.progress import Progress, TrainResult
from mttrain.rehearsal import Parts, rehearse
from mttrain.rundir import LOG, LOWER_IS_BETTER
from mttrain.runlog import RunLog, read_log
from mttrain.runsetup import tokenizers_of_run, write_config
from mttrain.store import text_hashes
from mttrain.utilisation import measured_peak
from mttrain.validation import Validator, text_meta

STATES_KEPT = 2  # newest checkpoints that keep their training state: the second is a reserve


class Run:
    """One run: its parts, and what happens around the loop."""

    def __init__(
        self, config: RunConfig, world: World, log: RunLog, changes: Sequence[str] = ()
    ) -> None:
        self.config, self.world, self.log, self.changes = config, world, log, changes
        self.run_dir = Path(config.run_dir)
        self.scores: dict[str, float] = {}
        self.origin: dict[str, Any] | None = None  # of the first weights
        self.start_from: Path | None = None
        self.metric = config.train.best_metric
        self.cpu = prepare_cpu(config.threads, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        wanted = config.train.precision
        if wanted == "bf16" and training_type(wanted, world.device) == torch.float32:
            self.cpu += "; float32, since bf16 would be slower on this processor"
        allow_tf32(config.train.tf32, world.device)
        self._sign = -1.0 if self.metric in LOWER_IS_BETTER else 1.0

    def run(self) -> TrainResult:
        """Build, resume, train, end."""
        # One process looks: on a file system of several nodes others may see less, or later.
        found = newest_good(self.run_dir, self._warn) if self.world.is_main else None
        name = self.world.gather_texts([found.name] if found else [])[0]
        self.start_from = self.run_dir / "checkpoints" / name[0] if name else None
        self.tokenizers: Tokenizers = tokenizers_of_run(self.config, self.world, self.log)
        self._load_text()
        self._choose_batch(self.world.size)
        self.model = self._new_model()
        self._take_origin()  # before the trainer, whose running mean begins with the weights
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
            update, saved = trainer.progress.update, trainer.saved
            state = {0: "nothing is saved yet", update: "its state is saved"}.get(
                saved, f"the state of update {saved} is saved"
            )
            self._say(
                f"stopped by {reason} after update {update}; {state}, and the same command goes on "
                "from there"
            )
            return TrainResult(reason, self.run_dir, read_index(self.run_dir).best)
        return self._finish(reason)

    def rehearse(self, done: Progress, processes: int) -> TrainResult:
        """Say what training would work on, what it needs and how long it takes.

        done: how far the run has come; processes: that will train.
        """
        self.tokenizers = tokenizers_of_run(self.config, self.world, self.log)
        self._load_text()
        self._choose_batch(processes)
        self.model = self._new_model()
        self._say_sizes()
        parts = Parts(self.config, self.dataset, self.model, self.world, self.log, done, processes)
        return TrainResult(rehearse(parts), self.run_dir, None)

    # ---- building ----------------------------------------------------------------------------

    def _load_text(self) -> None:
        """Encode the corpora (rank 0 first: the others map its files) and read the raw text."""
        data = self.config.data
        self.valid_text = load_raw(data.valid, data)
        self.test_text = load_raw(data.test, data) if data.test is not None else None
        if self.world.is_main:
            with self.log.progress(None, what="encoded pair") as bar:
                self.dataset, self.valid_set = self._encode(bar.update)
            if self.start_from is None:
                self._report_corpus()
        self.world.wait_for_main("text")
        if not self.world.is_main:
            self.dataset, self.valid_set = self._encode()
        self.validator = Validator(
            self.config, self.tokenizers, data.valid, self.valid_text, self.world
        )

    def _report_corpus(self) -> None:
        """Look at the corpora before training, and say what is in them."""
        self.log.truncate_after(-1)  # records of a run that died before its first checkpoint
        with self.log.progress(None, what="checked pair") as bar:
            stores = self.dataset.store, self.valid_set.store
            report = check_corpus(
                self.config.data, self.tokenizers, stores=stores, progress=bar.update
            )
        self.log.event("corpus", step=0, **report.to_dict())
        self._say(report.text())

    def _encode(
        self, progress: Callable[[int], None] | None = None
    ) -> tuple[TranslationDataset, TranslationDataset]:
        config, tokenizers = self.config, self.tokenizers
        directory = Path(config.data.cache_dir or self.run_dir / "data")
        drop = config.tokenizer.dropout
        train, valid = (
            encode_corpus(
                config.data,
                tokenizers,
                split,
                directory,
                words=drop > 0,
                trusted=not self.world.is_main,  # rank 0 has looked, and the others wait for it
                progress=progress,
                say=self._say,
            )
            for split in ("train", "valid")
        )
        dropping = TranslationDataset(train, tokenizers, drop, config.seed)
        return dropping, TranslationDataset(valid)

    def _choose_batch(self, processes: int) -> None:
        """Put a number in the place of `train.batch_tokens: auto`; config.yaml keeps it.

        processes: that will train.
        """
        if self.config.train.batch_tokens != "auto":
            return
        source, target = self.tokenizers
        sizes = source.size, target.size
        self.config, found = resolve_batch_tokens(
            self.config, self.dataset, sizes, self.world, processes
        )
        if self.world.is_main:
            write_config(self.config)
        self.log.event("batch_tokens", step=0, **vars(found))
        self._say(found.text())

    def _new_model(self) -> Transformer:
        torch.manual_seed(self.config.seed)
        source, target = self.tokenizers
        model = Transformer(self.config.model, source.size, target.size)
        return model.to(self.world.device)

    def _resume_or_begin(self) -> None:
        """Load the newest whole checkpoint, or begin at update 0."""
        folder = self.start_from
        peak = self._measure_peak()
        if folder is None:
            self.log.event("encoded", step=0, **self.dataset.store.report())
            if self.dataset.store.skipped:
                self._say(self.dataset.store.text())
            self.log.event(
                "begin",
                step=0,
                parameters=self.model.parameter_count(),
                device=str(self.world.device),
                ranks=self.world.size,
                threads=torch.get_num_threads(),
                cpu=self.cpu,
                **peak,
                config=self.config.model_dump(mode="json"),
            )
            self._say_sizes()
            if self.origin is not None:
                self.log.event("init", step=0, origin=self.origin)
                self._say(f"beginning with the weights of {self.origin['path']}")
                self._validate(self.trainer.progress)
                self.scores = {}  # no checkpoint of this run has them
            return
        bundle = load_model(folder, torch.device("cpu"))  # not beside the model on a GPU
        self._check_same_text(bundle.meta, folder)
        check_tokenizers(bundle.meta, self.tokenizers, folder)
        copy_weights(self.model, dict(bundle.model.named_parameters()))
        self.origin = bundle.meta.get("init_from")
        self.trainer.restore(load_train_state(folder))
        progress = self.trainer.progress
        if progress.validated == progress.update:  # a stop before the next update saves it again
            self.scores = dict(bundle.meta.get("scores", {}))
        self.world.barrier()  # every rank has read before the first one removes
        if self.world.is_main:
            self._forget_later(progress.update)
            self.log.truncate_after(progress.update, progress.validated)
            write_config(self.config)
        self.log.event(
            "resume", step=progress.update, changes=list(self.changes), cpu=self.cpu, **peak
        )
        for change in self.changes:
            self._say(f"changed: {change}")
        self._say(f"resuming after update {progress.update} (epoch {progress.epoch + 1})")

    def _measure_peak(self) -> dict[str, float | str]:
        """What the devices can do at most, for the log and for the share that training uses."""
        peak, how = measured_peak(self.world, self.config.train.precision)
        self.trainer.meter.peak = peak
        self._say(f"matrix products alone: {peak / 1e9:,.0f} GFLOP/s ({how})")
        return {"peak_flops": peak, "peak_how": how}

    def _take_origin(self) -> None:
        """Give a new run the weights of another one, if the configuration says so."""
        if self.config.train.init_from is None or self.start_from is not None:
            return
        bundle = origin_model(self.config, self.tokenizers)
        copy_weights(self.model, dict(bundle.model.named_parameters()))
        self.origin = origin_record(bundle)
        for name in ("source_lang", "target_lang"):
            mine, its = getattr(self.config.data, name), bundle.meta.get(name)
            if its is not None and its != mine:
                self._warn(f"data.{name} is {mine}, but {its} in {bundle.path}.")

    def _check_same_text(self, meta: dict[str, Any], folder: Path) -> None:
        """Refuse to go on over other text: the plan of the batches, or the scores, would change."""
        now, then = text_hashes(self.dataset.store, self.valid_set.store), meta.get("text_hashes")
        if then != now:
            known = then if isinstance(then, dict) else {}
            changed = ", ".join(name for name in now if known.get(name) != now[name])
            raise CheckpointError(
                f"{folder}: text has changed since this run began: {changed}. Put the old files "
                "back, or start again with --fresh."
            )

    def _forget_later(self, update: int) -> None:
        """Remove what is not on the way to `update`: damaged checkpoints, and the score of what
        an earlier end of the run made, which itself stays until the next end.
        """
        index = read_index(self.run_dir)
        names = {name for name in checkpoint_names(self.run_dir) if _step_of(name) <= update}
        scores = {name: values for name, values in index.scores.items() if name in names}
        kept = replace(index, scores=scores, last=f"step-{update:08d}")
        write_index(self.run_dir, replace(kept, best=next(iter(kept.ranked()), None)))
        prune(self.run_dir, names)

    # ---- during training ---------------------------------------------------------------------

    def _validate(self, progress: Progress) -> float | None:
        """Scores of the running model; returns what chooses the best, higher is better.

        None when a signal cut it short. Raises TrainingError when the model is no longer finite:
        such weights are never saved.
        """
        train = self.config.train
        found = self.validator.evaluate(
            self.model, self.valid_set, train.valid_beam, self.trainer.interrupted
        )
        if found is None:
            return None
        if not math.isfinite(found.likelihood.nll):
            raise TrainingError(
                f"training diverged: the validation loss after update {progress.update} is not "
                "finite. The last checkpoint is intact; lower optim.lr and run the same command "
                "again."
            )
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

    def _save(self, progress: Progress, improved: bool) -> None:
        """Checkpoint, index, and removal of what is no longer kept; rank 0 writes."""
        validated = progress.validated == progress.update
        state = self.trainer.state()
        if self.world.is_main:
            scores = self.scores if validated else {}
            name = f"step-{progress.update:08d}"
            if improved:  # before the save: after it, a kill between the two would lose the record
                self.log.event("best", step=progress.update, checkpoint=name, **scores)
            path = save_checkpoint(
                self.run_dir,
                progress.update,
                self.model,
                self._meta(scores),
                self.tokenizers,
                state,
            )
            index = read_index(self.run_dir)
            if index.metric != self.metric:
                index = Index(metric=self.metric, scores=index.scores)
            index = index.added(path.name, scores)
            self._keep(index)
        self.world.barrier()

    def _meta(self, scores: dict[str, float]) -> dict[str, Any]:
        content = {
            **text_meta(self.config.data),
            "text_hashes": text_hashes(self.dataset.store, self.valid_set.store),
            "decode": self.config.decode.model_dump(mode="json"),
            "scores": scores,
        }
        return content if self.origin is None else with_origin_tags(content, self.origin)

    def _keep(self, index: Index) -> None:
        """Write the index and remove checkpoints that are neither new, nor best, nor averaged."""
        train = self.config.train
        names = checkpoint_names(self.run_dir)
        assert index.last is not None  # the checkpoint that was just saved
        keep = {*validated(self.run_dir, index)[-train.keep_last :], index.last}
        if index.best is not None:
            keep.add(index.best)
        keep |= set(averaged_best(index, train))
        scores = {name: values for name, values in index.scores.items() if name in keep}
        # The index goes first: it never names a checkpoint that is gone.
        write_index(self.run_dir, replace(index, scores=scores))
        prune(self.run_dir, keep, keep_state=names[-STATES_KEPT:])

    # ---- the end -----------------------------------------------------------------------------

    def _finish(self, reason: str) -> TrainResult:
        """Choose the result, score the test set once, write the closing record."""
        progress = self.trainer.progress
        self._say(f"training ended by {reason} after update {progress.update}")
        ending = Ending(
            self.config,
            self.world,
            self.log,
            self.model,
            self.tokenizers,
            self.validator,
            self.valid_set,
            progress.update,
            self._meta,
        )
        best = ending.choose(self.trainer.updater.ema_weights())
        self._compare_with_origin(progress)
        scores = [] if self.test_text is None else ending.test(best, self.test_text)
        self.log.event(
            "end",
            step=progress.update,
            epoch=progress.epoch,
            reason=reason,
            best=best,
            seconds=round(progress.seconds, 1),
            elapsed=round(progress.elapsed, 1),
            left_out=progress.left_out,
            bad_validations=progress.bad_validations,
        )
        self._say(f"the best checkpoint is {best} in {self.run_dir / 'checkpoints'}")
        return TrainResult(reason, self.run_dir, best, scores)

    def _compare_with_origin(self, progress: Progress) -> None:
        """Warn when no validation was better than the first one, that of the origin. Of a mean of
        weights, which is scored by another search, that says nothing."""
        records = read_log(self.run_dir / LOG) if self.world.is_main and self.origin else []
        first = next((r for r in records if r["kind"] == "valid" and r["step"] == 0), None)
        if first is None or progress.best is None:
            return
        if not progress.best > self._sign * first[self.metric]:
            self._warn(
                f"no validation has a better {self.metric} than the weights that training began "
                f"with ({first[self.metric]:.4g}): {self.config.train.init_from}"
            )

    def _say_sizes(self) -> None:
        self._say(
            f"{self.model.parameter_count():,} parameters; vocabulary "
            f"{' + '.join(str(t.size) for t in dict.fromkeys(self.tokenizers))}; "
            f"{len(self.dataset):,} training pairs; {self.world.device}"
        )
        if mixture := self.dataset.store.mixture():
            self._say(mixture)
        self._say(self.cpu)
        if self.config.train.tf32 and self.world.device.type != "cuda":
            self._say(f"train.tf32 has no effect on {self.world.device.type}")
        if self.config.train.parallel == "fsdp" and self.world.size == 1:
            self._say("train.parallel fsdp has no effect in one process")

    # ---- talking -----------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        if self.world.is_main:
            self.log.say(text)

    def _warn(self, text: str) -> None:
        self._say(f"warning: {text}")


def _step_of(name: str) -> int:
    return int(name.removeprefix("step-"))
