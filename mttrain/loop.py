"""The training loop: accumulate, clip, update, log, validate, save, stop, resume.

The last update of an epoch takes what batches are left and is divided by the tokens they hold.

The order of the data is a function of (seed, epoch), and an update draws from no global generator:
so weights, optimiser and the few numbers of `Progress` are all that exact resuming needs.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from mttrain.batching import EpochPlan, TokenBatchSampler
from mttrain.checkpoint import TrainState
from mttrain.config import RunConfig
from mttrain.dataset import Batch, TranslationDataset, batch_loader, epoch_plan
from mttrain.distributed import World
from mttrain.errors import CheckpointError, TrainingError
from mttrain.machine import peak_memory
from mttrain.model import Transformer
from mttrain.progress import Interrupt, Progress, Window, limit_reached
from mttrain.runlog import RunLog
from mttrain.update import Pending, Updater
from mttrain.utilisation import Meter

# Over ranks, in Window.
SUMMED = ("smoothed", "nll", "correct", "target_tokens", "source_tokens", "flops", "cells")


class Trainer:
    """Runs updates on built parts; the files of a run are its caller's affair.

    model: moved to world.device by the caller. `on_validate(progress)` is called on every rank
    after each `valid_every` updates and at the end, and returns the value that chooses the best
    checkpoint (higher is better), or None, on all ranks, when a signal cut it short;
    `on_save(progress, improved)` writes a checkpoint.
    """

    def __init__(
        self,
        config: RunConfig,
        model: Transformer,
        dataset: TranslationDataset,
        world: World,
        log: RunLog,
        *,
        on_validate: Callable[[Progress], float | None],
        on_save: Callable[[Progress, bool], None],
    ) -> None:
        self.config, self.model, self.world, self.log = config, model, world, log
        self.dataset = dataset
        self.on_validate, self.on_save = on_validate, on_save
        self.progress = Progress()
        self.updater = Updater(config, model, world, dataset.locate)
        self.meter = Meter(config, model.lm_head.out_features)
        self.saved = 0  # the update whose state the newest checkpoint holds
        self.interrupt = Interrupt()
        self.sampler = TokenBatchSampler(
            partial(epoch_plan, config, dataset), rank=world.rank, world=world.size
        )
        self._open: list[tuple[int, Pending, list[Batch]]] = []  # updates that are not booked yet
        self._compiled = 0  # graphs, as logged
        self._clock = self._lap = time.monotonic()

    # ---- state -------------------------------------------------------------------------------

    def state(self) -> TrainState:
        """What a checkpoint must hold to go on exactly from here, besides the weights.

        Every rank must call it.
        """
        state = self.updater.state()
        values = {
            **state.values,
            "progress": asdict(self.progress),
            "batches_per_update": self._batches_per_update,
        }
        return TrainState(tensors=state.tensors, values=values)

    def restore(self, state: TrainState) -> None:
        """Go on from a saved state; the weights are loaded by the caller."""
        self.progress = Progress.from_dict(state.values["progress"])
        self.saved = self.progress.update
        self.updater.restore(state)
        if not self.world.is_main:
            self.progress.window = Window()  # rank 0 holds the sums of all
        former = state.values["batches_per_update"]
        if former != self._batches_per_update:
            self.log.say(
                f"warning: an update now takes {self._batches_per_update} batches, not {former} as "
                "before: accumulate x number of processes has changed"
            )

    # ---- loop --------------------------------------------------------------------------------

    def run(self) -> str:
        """Train until a limit, early stopping or a signal; returns the reason.

        Raises TrainingError when the gradient stays not finite.
        """
        self._clock = self._lap = time.monotonic()
        total = self.config.train.max_steps
        loader = batch_loader(
            self.dataset,
            self.sampler,
            workers=self.config.data.workers,
            pin_memory=self.world.device.type == "cuda",
        )
        self.model.train()
        with (
            self.interrupt,
            self.log.progress(total, initial=self.progress.update) as self._bar,
        ):
            reason = self._validate_if_due() or self._limit()
            while not reason:
                reason = self._epoch(loader)
            if reason not in ("SIGINT", "SIGTERM") and self._unvalidated():
                reason = self._validate() or reason
            self.updater.parallel.collect()
        return reason

    @property
    def _batches_per_update(self) -> int:
        return self.config.train.accumulate * self.world.size

    def _epoch(self, loader: Iterable[Any]) -> str:
        """Train to the end of the epoch; returns the reason to stop or an empty string."""
        progress = self.progress
        self.sampler.set_position(progress.epoch, progress.batches)
        plan = self.sampler.plan
        if progress.batches >= len(plan):
            raise CheckpointError(
                f"the training state is {progress.batches} batches into an epoch of {len(plan)}: "
                "it is damaged, or of another corpus. Start again with --fresh."
            )
        if progress.batches == 0:
            self._log_epoch(plan)
        divisors = plan.update_tokens(self._batches_per_update, progress.batches).tolist()
        for group, divisor in zip(self._groups(loader), divisors, strict=True):
            self._update(group, divisor)
            progress.batches += self._batches_per_update
            if progress.batches >= len(plan):
                progress.epoch, progress.batches = progress.epoch + 1, 0
            reason = self._validate_if_due() or self._limit()
            if reason:
                return reason
        return ""

    def _groups(self, batches: Iterable[Batch]) -> Iterator[list[Batch]]:
        """This rank's batches of one update after the other."""
        group: list[Batch] = []
        for batch in self._timed(batches):
            group.append(batch)
            if len(group) == self.config.train.accumulate:
                yield group
                group = []
        if group:
            yield group

    def _timed(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches; the time until each is there goes into the log."""
        source, start = iter(batches), time.monotonic()
        for batch in source:
            self.progress.window.waiting += time.monotonic() - start
            yield batch
            start = time.monotonic()

    def _log_epoch(self, plan: EpochPlan) -> None:
        self.log.event(
            "epoch",
            epoch=self.progress.epoch,
            step=self.progress.update + 1,  # its first update: a resumed run writes it again
            batches=len(plan),
            source_tokens=int(plan.source_tokens.sum()),
            target_tokens=int(plan.target_tokens.sum()),
            padding=round(plan.padding, 4),
        )

    def _limit(self) -> str:
        progress = self.progress
        now = time.monotonic()
        progress.elapsed += now - self._lap
        self._lap = now
        # The clocks of the ranks differ: what rank 0 reads is what counts.
        mine = [float(self.interrupt.signal), progress.elapsed if self.world.is_main else 0.0]
        signals, elapsed = self.world.sum(mine)
        if signals:
            return self._save_and_stop()
        return limit_reached(
            self.config.train, progress.update, progress.epoch, elapsed, progress.bad_validations
        )

    def interrupted(self) -> bool:
        """Whether any rank was sent a signal; every rank must ask at the same point."""
        return self.world.largest(self.interrupt.signal) > 0

    def _save_and_stop(self) -> str:
        """Save the state and return the name of the signal."""
        self._settle()
        if self.progress.bad_updates == 0 or self.updater.dtype == torch.float16:
            self._save(improved=False)
        return signal.Signals(self.interrupt.signal or signal.SIGTERM).name

    def _save(self, improved: bool) -> None:
        self._share_window()
        self.updater.parallel.collect()
        self.on_save(self.progress, improved)
        self.saved = self.progress.update

    def _share_window(self) -> None:
        """Move the sums of all ranks to rank 0, which saves its own."""
        window = self.progress.window
        sums = self.world.sum([getattr(window, name) for name in SUMMED])
        for name, value in zip(SUMMED, sums, strict=True):
            setattr(window, name, value if self.world.is_main else 0)

    # ---- books -------------------------------------------------------------------------------

    def _update(self, group: list[Batch], divisor: int) -> None:
        """One update, counted in the log window; writes a record when it is due."""
        progress = self.progress
        pending = self.updater.run(group, divisor, progress.update + 1)
        progress.update += 1
        self._open.append((progress.update, pending, group))
        due = progress.update % self.config.train.log_every == 0
        self._settle(all_of_them=due or not self.updater.deferred)
        now = time.monotonic()
        progress.seconds += now - self._clock
        progress.window.seconds += now - self._clock
        self._clock = now
        if due:
            self._log_window(pending.rate)

    def _settle(self, all_of_them: bool = True) -> None:
        """Book the updates that are under way, or all but the newest."""
        if all_of_them and self.updater.deferred:
            # Tells of a process that is gone, for which a GPU would wait without a word.
            self.world.barrier()
        while len(self._open) > (0 if all_of_them else 1):
            self._book(*self._open.pop(0))

    def _book(self, update: int, pending: Pending, group: list[Batch]) -> None:
        progress, window = self.progress, self.progress.window
        outcome = pending.read()
        if outcome.pieces > 1:
            self._cut(update, outcome.pieces)
        if outcome.finite:
            smoothed, nll, correct = outcome.sums
            window.smoothed += smoothed
            window.nll += nll
            window.correct += correct
            window.target_tokens += sum(batch.target_tokens for batch in group)
            window.source_tokens += sum(batch.source_tokens for batch in group)
            for batch in group:
                self.meter.add(window, batch)
            window.updates += 1
            window.norm += outcome.norm
            progress.bad_updates = 0
        else:
            self._left_out(update, group)

    def _cut(self, update: int, pieces: int) -> None:
        """Count an update whose batches did not fit in memory; the first is told."""
        progress = self.progress
        progress.cut += 1
        self.log.event("cut", step=update, pieces=pieces)
        if progress.cut == 1:
            self.log.say(
                f"warning: a batch of update {update} did not fit in memory and was "
                f"computed in {pieces} pieces, which takes time; the log counts such updates. "
                "A smaller train.batch_tokens with a larger train.accumulate avoids them."
            )

    def _left_out(self, update: int, group: list[Batch]) -> None:
        """Count an update whose gradient was not finite; too many in a row end the run."""
        progress = self.progress
        progress.bad_updates += 1
        progress.left_out += 1
        limit = self.config.train.max_bad_updates
        if self.updater.dtype == torch.float16 and progress.bad_updates < limit:
            return  # the loss scaler looks for its scale this way
        pairs = [self.dataset.locate(i) for batch in group for i in batch.indices]
        self.log.event("left_out", step=update, pairs=pairs)
        ranks = "" if self.world.size == 1 else " and those of the other processes"
        self.log.say(
            f"warning: the gradient of update {update} is not finite and was left out; "
            f"pairs: {', '.join(pairs[:5])}{', ...' if len(pairs) > 5 else ''}{ranks}"
        )
        if progress.bad_updates >= limit:
            raise TrainingError(
                f"training diverged: {progress.bad_updates} updates in a row, up to update "
                f"{update}, had a gradient that is not finite. The last checkpoint is "
                "intact; lower optim.lr and run the same command again."
            )

    def _log_window(self, rate: float) -> None:
        progress, window = self.progress, self.progress.window
        progress.window = Window()
        totals = self.world.sum([getattr(window, name) for name in SUMMED])
        sums = dict(zip(SUMMED, totals, strict=True))
        targets = sums["target_tokens"]
        peak = int(self.world.largest(peak_memory(self.world.device)))
        # The others wait, in the exchange of gradients, for whoever waits for data.
        waiting = self.world.largest(window.waiting / max(window.seconds, 1e-9))
        if targets == 0:
            return
        loss, speeds = sums["smoothed"] / targets, self.meter.record(sums, window.seconds)
        self.log.event(
            "train",
            step=progress.update,
            epoch=progress.epoch,
            loss=loss,
            nll=sums["nll"] / targets,
            accuracy=sums["correct"] / targets,
            lr=rate,
            grad_norm=window.norm / max(1, window.updates),
            target_tokens=int(targets),
            source_tokens=int(sums["source_tokens"]),
            left_out=progress.left_out,
            cut=progress.cut,
            **speeds,
            seconds=round(progress.seconds, 2),
            waiting=round(waiting, 4),
            peak_memory_mb=peak,
        )
        self._log_compiled()
        self._bar.update(
            progress.update,
            loss=f"{loss:.3f}",
            lr=f"{rate:.2e}",
            tok_s=f"{speeds['tokens_per_second']:.0f}",
        )

    def _log_compiled(self) -> None:
        """Tell of code that was compiled since the last time."""
        compiler = self.updater.compiler
        if compiler is None or compiler.graphs == self._compiled:
            return
        self._compiled = compiler.graphs
        seconds = round(compiler.seconds, 1)
        self.log.event(
            "compiled", step=self.progress.update, graphs=compiler.graphs, seconds=seconds
        )
        self.log.say(f"torch.compile has made {compiler.graphs} pieces of code, in {seconds:.0f} s")

    # ---- validation --------------------------------------------------------------------------

    def _unvalidated(self) -> bool:
        return self.progress.validated < self.progress.update

    def _validate_if_due(self) -> str:
        due = self.progress.update % self.config.train.valid_every == 0
        return self._validate() if due and self._unvalidated() else ""

    def _validate(self) -> str:
        """Validate, keep the books of the best, save; returns a reason to stop or nothing."""
        progress = self.progress
        self._settle()
        self.updater.parallel.collect()
        with self._evaluating():
            value = self.on_validate(progress)
        if value is None:  # cut short: resuming validates this update again
            return self._save_and_stop()
        progress.validated = progress.update
        # NaN compares false: it is never the best.
        improved = value > (-math.inf if progress.best is None else progress.best)
        if improved:
            progress.best, progress.bad_validations = value, 0
        else:
            progress.bad_validations += 1
        self._save(improved)
        return ""

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Evaluation mode, and a training clock that stands still."""
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.train()
            self._clock = time.monotonic()
