"""Validation: likelihood of the reference, and BLEU and chrF of translations of the raw text.

Translations are made by the very code of `mttrain translate` and scored against the untouched
reference lines, so a figure in the training log is what `translate` and `eval` give for that
checkpoint with the same beam, length penalty and precision. Under several processes each rank takes
every W-th line and batch, and the sums are exact.

Price: one forward pass over the validation pairs and one search; with beam 1 the search costs about
as much as a few dozen updates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mttrain.batching import TokenBatchSampler, plan_epoch
from mttrain.checkpoint import ModelBundle, Tokenizers
from mttrain.config import CorpusConfig, DataConfig, RunConfig
from mttrain.dataset import TranslationDataset, batch_loader
from mttrain.distributed import World, training_precision, training_type
from mttrain.loss import smoothed_loss
from mttrain.metrics import Score, perplexity, score_corpus
from mttrain.model import Transformer
from mttrain.translator import TranslateOptions, Translator

WINDOW = 256  # lines of a rank that are translated between two looks at a signal
VALID_BATCH_TOKENS = 4096  # padded tokens of a side in a validation batch; no gradients are kept


@dataclass(frozen=True)
class Likelihood:
    """Mean negative log-likelihood in nats per target token (EOS counts), and the share of tokens
    that were the most likely ones."""

    nll: float
    accuracy: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp(nll); infinite rather than an overflow error when the loss is huge."""
        return perplexity(self.nll)


def likelihood(
    model: Transformer, dataset: TranslationDataset, config: RunConfig, world: World
) -> Likelihood:
    """Over all pairs of the set, whatever the batches and the number of ranks."""

    plan = plan_epoch(
        0, 0, dataset.source_lengths, dataset.target_lengths, batch_tokens=VALID_BATCH_TOKENS
    )
    sampler = TokenBatchSampler(lambda _: plan, rank=world.rank, world=world.size)
    dtype = training_type(_precision(config, world), world.device)
    total = torch.zeros(2, dtype=torch.float64)
    tokens = 0
    with torch.no_grad(), training_precision(world.device, dtype):
        for batch in batch_loader(dataset, sampler):
            moved = batch.to(world.device)
            hidden = model(moved.source, moved.target_in)
            sums = smoothed_loss(hidden, model.lm_head.weight, moved.target_out, 0.0, model.pad_id)
            total += torch.stack((sums.nll, sums.correct)).double().cpu()
            tokens += sums.tokens
    nll, correct, count = world.sum([*total.tolist(), tokens])
    return Likelihood(nll / count, correct / count, int(count))


def _precision(config: RunConfig, world: World) -> str:
    """On a CPU as `translate` and `score` do it: half precision there is for training alone."""
    return "auto" if world.device.type == "cpu" else config.train.precision


@dataclass(frozen=True)
class Evaluation:
    """Scores of one model: by metric name ("bleu", "chrf", "nll"), with signatures, and texts."""

    values: dict[str, float]
    scores: list[Score]
    likelihood: Likelihood
    texts: list[str]

    def record(self) -> dict[str, object]:
        """The figures and how they were made, for the log."""
        return {
            **self.values,
            "perplexity": self.likelihood.perplexity,
            "accuracy": self.likelihood.accuracy,
            "target_tokens": self.likelihood.tokens,
            "signatures": [score.signature for score in self.scores],
        }

    def text(self) -> str:
        """The figures in one line."""
        figures = [f"{score.name} {score.value:.2f}" for score in self.scores]
        return ", ".join([*figures, f"perplexity {self.likelihood.perplexity:.2f}"])


def text_meta(data: DataConfig) -> dict[str, Any]:
    """What meta.json says of the text that a model is trained on, for those who translate."""
    return {
        "source_lang": data.source_lang,
        "target_lang": data.target_lang,
        "max_length": data.max_length,
        "tags": data.train_tags(),
        "untagged": data.untagged(),
    }


class Validator:
    """Translates and scores one raw text with whatever model it is handed."""

    def __init__(
        self,
        config: RunConfig,
        tokenizers: Tokenizers,
        corpus: CorpusConfig,
        text: tuple[list[str], list[str]],
        world: World,
    ) -> None:
        """corpus: whose raw text `text` is; it decides on the languages and the tag."""
        self.config, self.tokenizers, self.world = config, tokenizers, world
        self.langs, self.tag = config.data.langs_of(corpus), config.data.tag_of(corpus)
        self.sources, self.references = text

    def evaluate(
        self,
        model: Transformer,
        dataset: TranslationDataset,
        beam: int,
        stop: Callable[[], bool] = lambda: False,
    ) -> Evaluation | None:
        """Likelihood of `dataset`, the encoded pairs of the text, and scores of translations.

        None when `stop` said so; see `translate`.
        """
        model.eval()
        known = likelihood(model, dataset, self.config, self.world)
        texts = self.translate(model, beam, stop)
        if texts is None:
            return None
        scores = self.score(texts)
        values = {score.name.lower(): score.value for score in scores} | {"nll": known.nll}
        return Evaluation(values, scores, known, texts)

    def translate(
        self, model: Transformer, beam: int, stop: Callable[[], bool] = lambda: False
    ) -> list[str] | None:
        """One output per source line, or None when `stop` is true before one of the windows.

        All ranks have equally many windows, so `stop` may ask them all.
        """
        translator = Translator(
            [self._bundle(model)],
            device=self.world.device,
            precision=_precision(self.config, self.world),
        )
        decode = self.config.decode
        options = TranslateOptions(
            beam=beam,
            length_penalty=decode.length_penalty,
            max_length=decode.max_length,
            tag=self.tag,
        )
        size = self.world.size
        mine = self.sources[self.world.rank :: size]
        mine += [""] * (-(-len(self.sources) // size) - len(mine))
        texts: list[str] = []
        for start in range(0, len(mine), WINDOW):
            if stop():
                return None
            texts += translator.translate(mine[start : start + WINDOW], options)
        if stop():
            return None
        parts = self.world.gather_texts(texts)
        return [parts[i % size][i // size] for i in range(len(self.sources))]

    def _bundle(self, model: Transformer) -> ModelBundle:
        meta = text_meta(self.config.data)
        return ModelBundle(model, *self.tokenizers, meta, Path(self.config.run_dir))

    def score(self, texts: Sequence[str], metrics: Sequence[str] = ("bleu", "chrf")) -> list[Score]:
        """Against the raw references, with the BLEU tokenizer of the target language."""
        return score_corpus(texts, [self.references], lang=self.langs[1], metrics=tuple(metrics))

    def samples(self, texts: Sequence[str], count: int) -> list[dict[str, str]]:
        """`count` lines with their output, evenly spread, the same ones at each validation."""
        total = len(self.sources)
        count = min(count, total)
        return [
            {"source": self.sources[i], "output": texts[i], "reference": self.references[i]}
            for i in (number * total // count for number in range(count))
        ]
