"""Ids to hypotheses: what stands behind a translator, and the engine that is our own.

A translator deals with lines, batches and text; an `Engine` is handed rows of ids and gives back
hypotheses, or the log-probabilities of given ones. `TorchEngine` runs our search over our models,
one or several as an ensemble that averages probabilities; other programs stand behind the same
protocol (module `ct2_engine`). Ids and scores mean the same in all of them: sources end with EOS,
the decoder starts with BOS, a score is the log-probability of the tokens and of EOS, if there is
one, without renormalising for what was forbidden.

Price of `TorchEngine`: the weights prepared for decoding (module `inference`), once for each
`searcher`; forced scoring is one forward pass.

Shapes: B rows, S source length, T target length, N target tokens of a batch, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mttrain.distributed import autocast
from mttrain.model import Transformer
from mttrain.search import EnsembleStepper, Hypothesis, Stepper, search
from mttrain.segments import TranslateOptions, padded
from mttrain.tokenizer import BOS_ID, PAD_ID, Tokenizer

_LOGITS = 1 << 22  # numbers per block of logits in forced scoring: 16 MB of float32


@dataclass(frozen=True, slots=True)
class Row:
    """What one row of a search translates."""

    key: int  # of random draws
    ids: list[int]  # of the source, EOS included
    prefix: list[int]  # what the output begins with


Search = Callable[[Sequence[Row], TranslateOptions], list[list[Hypothesis]]]
"""Rows of one batch and completed options -> 1 to nbest hypotheses for each row, best first."""
Item = tuple[Sequence[int], Sequence[int]]
"""Source ids with EOS, and target ids; without EOS at their end they are scored as they stand."""


class Described(Protocol):
    """What the text side needs of a model: how text becomes ids, and what meta.json says."""

    @property
    def source_tokenizer(self) -> Tokenizer: ...

    @property
    def target_tokenizer(self) -> Tokenizer: ...

    @property
    def meta(self) -> dict[str, Any]: ...

    @property
    def path(self) -> Path: ...


class Engine(Protocol):
    """Turns source ids into hypotheses, and scores given pairs."""

    name: str  # as --engine has it

    @property
    def device(self) -> torch.device:
        """Where the work is done; it decides how large a batch may be."""

    @property
    def max_positions(self) -> int | None:
        """Longest source and output in tokens; None = any."""

    def check(self, options: TranslateOptions) -> None:
        """ConfigError, naming the option, for what the engine cannot do as it is meant."""

    def ready(self) -> AbstractContextManager[None]:
        """Around a group of searches or scorings."""

    def searcher(self) -> Search:
        """What searches with the weights as they are now; it is to be called under `ready`."""

    def score(self, items: Sequence[Item]) -> list[float]:
        """Log-probability of each target, for one batch; called under `ready`."""

    def token_scores(self, items: Sequence[Item]) -> list[list[float]]:
        """The same for each token of each target: `score` is their sum."""


class TorchEngine:
    """Our models and our search; `device` must be where the models are."""

    name = "torch"

    def __init__(
        self,
        models: Sequence[Transformer],
        device: torch.device,
        dtype: torch.dtype,
        make_stepper: Callable[[Any, torch.dtype], Stepper[Any]],
    ) -> None:
        """dtype: of the matrix products; make_stepper: what the search works with, of a model and
        that type."""
        self.models = list(models)
        self.device, self.dtype = device, dtype
        self._make_stepper = make_stepper
        self._prepared: Stepper[Any] | None = None
        self.frozen = False  # nobody trains these models: one preparation serves all searches

    @property
    def max_positions(self) -> int | None:
        """Longest source and output in tokens that every member can hold; None = any."""
        limits = [m.max_positions for m in self.models if m.max_positions is not None]
        return min(limits, default=None)

    def check(self, options: TranslateOptions) -> None:
        """Nothing is refused: the options are made for this engine."""

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Models in evaluation mode (restored afterwards), no gradients, the wanted precision."""
        with ExitStack() as stack:
            for model in self.models:
                stack.callback(model.train, model.training)
                model.eval()
            # Not inference_mode: a position table that grows in scoring is used in training later.
            stack.enter_context(torch.no_grad())
            stack.enter_context(autocast(self.device, self.dtype))
            yield

    def searcher(self) -> Search:
        """The search over the models as they are now."""
        stepper = self._stepper()

        def find(rows: Sequence[Row], options: TranslateOptions) -> list[list[Hypothesis]]:
            with torch.inference_mode():  # an eighth of a single sentence's time less than no_grad
                return search(
                    stepper,
                    padded([row.ids for row in rows], self.device),
                    options,
                    lengths=[len(row.ids) - 1 for row in rows],
                    prefixes=[row.prefix for row in rows],
                    limit=self.max_positions,
                    line_ids=[row.key for row in rows],
                )

        return find

    def _stepper(self) -> Stepper[Any]:
        """The models as the search wants them; frozen ones are prepared once."""
        if self._prepared is None or not self.frozen:
            steppers = [self._make_stepper(model, self.dtype) for model in self.models]
            self._prepared = steppers[0] if len(steppers) == 1 else EnsembleStepper(steppers)
        return self._prepared

    def score(self, items: Sequence[Item]) -> list[float]:
        """Sums of log-probabilities, one for each of the B items."""
        sums: list[float] = self._forced(items).sum(1).tolist()
        return sums

    def token_scores(self, items: Sequence[Item]) -> list[list[float]]:
        """The log-probabilities that `score` sums, one for each target token."""
        rows: list[list[float]] = self._forced(items).tolist()
        return [row[: len(target)] for row, (_, target) in zip(rows, items, strict=True)]

    def _forced(self, items: Sequence[Item]) -> Tensor:
        """Log-probabilities [B, T] of the target tokens, 0 at the padding."""
        src = padded([source for source, _ in items], self.device)
        out = padded([target for _, target in items], self.device)  # [B, T]
        begin = out.new_full((len(items), 1), BOS_ID)
        real = torch.arange(out.shape[1], device=self.device) < torch.tensor(
            [len(target) for _, target in items], device=self.device
        ).unsqueeze(1)
        tgt_in = torch.cat([begin, out[:, :-1]], 1).masked_fill(~real, PAD_ID)
        each = [_picked(model, model(src, tgt_in)[real], out[real]) for model in self.models]
        picked = torch.stack(each).logsumexp(0) - math.log(len(each))  # [N]
        scores = torch.zeros(out.shape, device=self.device)
        scores[real] = picked
        return scores


def _picked(model: Transformer, hidden: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities [N] of tokens [N] from hidden [N, D], a block of logits at a time."""
    rows = max(1, _LOGITS // model.lm_head.out_features)
    blocks = []
    for start in range(0, len(tokens), rows):
        logits = model.project(hidden[start : start + rows])
        log_probs = F.log_softmax(logits, dim=-1, dtype=torch.float32)
        blocks.append(log_probs.gather(1, tokens[start : start + rows, None])[:, 0])
    return torch.cat(blocks)
