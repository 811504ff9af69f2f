"""The tasks of bench.py that run mttrain itself, each in a process of its own.

    python scripts/bench_ours.py TASK SETUP ARGUMENTS      (see bench_setup.answer)

Training goes through `mttrain.loop.Trainer`, decoding through `mttrain.translator.Translator`: the
classes that the command line uses, not copies of them. What is measured is hooked in from outside:
the log that the trainer writes to, and the loader that it reads from.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_hooks import Probe, Supply, Synthetic
from bench_matmul import Recorder, Replay, synchronise
from bench_setup import (
    BATCH_SENTENCES,
    MIN_UPDATES,
    TOKENS,
    BenchError,
    Setup,
    answer,
)
from torch import Tensor

import mttrain.loop
from mttrain.checkpoint import ModelBundle, load_model
from mttrain.config import DataConfig, RunConfig
from mttrain.dataset import TranslationDataset, encode_corpus
from mttrain.distributed import World, choose_device
from mttrain.machine import prepare_cpu
from mttrain.metrics import score_corpus
from mttrain.model import Transformer
from mttrain.tokenizer import Tokenizer
from mttrain.translator import TranslateOptions, Translator

MOST_RECORDED = 40  # updates whose products are recorded
COLD = 3  # first updates, that are left out
SYNTHETIC_TOKENS = 1_000_000  # of each side of a corpus of random ids
BLOCK_SECONDS = 1.0  # real steps between two replays


# ---- training ---------------------------------------------------------------------------------


class _Enough(Exception):
    """Ends a training run from inside."""


def train_once(setup: Setup, dataset: Any, vocab: int, on_update: Callable[[int], bool]) -> None:
    """One run of the real loop on built parts, without validation and checkpoints.

    `on_update(tokens)` is called after each update and says whether to stop.
    """

    def after_update(tokens: int) -> None:
        if on_update(tokens):
            raise _Enough

    config = RunConfig.model_validate(setup.run_settings(setup.work, max_steps=10**9))
    prepare_cpu(setup.threads)  # as `mttrain train` does
    device = choose_device(config.train.device)
    torch.manual_seed(config.seed)
    model = Transformer(config.model, vocab, vocab).to(device)
    trainer = mttrain.loop.Trainer(
        config,
        model,
        dataset,
        World(0, 1, device),
        Probe(after_update),
        on_validate=lambda progress: 0.0,
        on_save=lambda progress, improved: None,
    )
    with suppress(_Enough):
        trainer.run()


def common_dataset(setup: Setup) -> tuple[TranslationDataset, int]:
    """The common training text, encoded, and the size of its vocabulary."""
    tokenizer = Tokenizer.load(setup.text("tokenizer.json"))
    tree = setup.run_settings(setup.work, max_steps=1)
    data = DataConfig.model_validate(tree["data"])
    folder = Path(tree["data"]["cache_dir"])
    store = encode_corpus(data, (tokenizer, tokenizer), "train", folder)
    return TranslationDataset(store), tokenizer.size


def train(setup: Setup, *, length: int = 0) -> dict[str, Any]:
    """Steady speed, padding and waiting, on the common text or on random ids of one length."""
    dataset: Any
    if length:
        vocab, pairs = setup.vocab, SYNTHETIC_TOKENS // length
        dataset = Synthetic(pairs, length, vocab)
    else:
        dataset, vocab = common_dataset(setup)
    supply, times, tokens = Supply(), [], []

    def on_update(count: int) -> bool:
        now = time.perf_counter()
        if times and now - start < setup.warmup:
            times.clear()
            tokens.clear()
        if not times:
            supply.clear()
        times.append(now)
        tokens.append(count)
        return len(times) > MIN_UPDATES and now - times[0] >= setup.seconds

    start = time.perf_counter()
    with supply.hooked():
        train_once(setup, dataset, vocab, on_update)
    seconds = times[-1] - times[0]
    return {
        "rate": sum(tokens[1:]) / seconds,
        "updates": len(times) - 1,
        "seconds": round(seconds, 2),
        "padding": supply.padding(),
        "waiting": round(supply.waited / seconds, 4),
        "device_mb": device_peak(setup),
    }


def device_peak(setup: Setup) -> float | None:
    """Most memory that tensors took on a GPU, in MB; None on a CPU."""
    return torch.cuda.max_memory_allocated() / 2**20 if setup.device == "cuda" else None


def bound(setup: Setup) -> dict[str, Any]:
    """Real updates, and the same updates' matrix products alone, in turn.

    The updates are run twice: recorded first, then timed, with a replay after each block of them.
    Batches are a function of seed and epoch, so both passes have the same shapes.
    """
    dataset, vocab = common_dataset(setup)
    device = choose_device(setup.device)
    recorder, start = Recorder(), time.perf_counter()

    def record(_: int) -> bool:
        recorder.cut()
        late = time.perf_counter() - start >= setup.seconds
        return len(recorder.updates) >= COLD + (MIN_UPDATES if late else MOST_RECORDED)

    with recorder:
        train_once(setup, dataset, vocab, record)
    replay, supply = Replay(recorder.updates, device), Supply()
    clock = _Turns(replay, supply)
    with supply.hooked():
        train_once(setup, dataset, vocab, clock.on_update)
    flops = sum(replay.flops[COLD:])
    return {
        **clock.figures(),
        "products_per_update": len(recorder.updates[-1]),
        "gflops_of_products": round(flops / sum(clock.alone) / 1e9, 1),
        "waiting": round(supply.waited / sum(clock.real), 4),
        "padding": supply.padding(),
        "unknown": sorted(recorder.unknown),
    }


class _Turns:
    """Times blocks of real updates and, after each, the replay of their products."""

    def __init__(self, replay: Replay, supply: Supply) -> None:
        self.replay, self.supply = replay, supply
        self.real: list[float] = []
        self.alone: list[float] = []
        self.tokens = 0
        self._update, self._first = 0, COLD
        self._begin = time.perf_counter()

    def on_update(self, tokens: int) -> bool:
        """An update is done; it waited for its device already. True after the last."""
        now = time.perf_counter()
        self._update += 1
        if self._update <= COLD:
            self.supply.clear()
            self._begin = time.perf_counter()
            return False
        self.tokens += tokens
        done = self._update == len(self.replay.flops)
        if now - self._begin >= BLOCK_SECONDS or done:
            self.real.append(now - self._begin)
            self.alone.append(self.replay.time_of(self._first, self._update))
            self._first = self._update
            self._begin = time.perf_counter()
        return done

    def figures(self) -> dict[str, Any]:
        """Tokens per second of both, and the times of the blocks as ratios."""
        ratios = [real / alone for real, alone in zip(self.real, self.alone, strict=True)]
        return {
            "rate": self.tokens / sum(self.real),
            "bound_rate": self.tokens / sum(self.alone),
            "ratio": sum(self.real) / sum(self.alone),
            "block_ratios": [round(ratio, 3) for ratio in ratios],
            "updates": self._update - COLD,
        }


# ---- decoding ---------------------------------------------------------------------------------


def test_lines(setup: Setup, side: str = "src") -> list[str]:
    """The lines of the test text."""
    return Path(setup.text(f"test.{side}")).read_text(encoding="utf-8").split("\n")[:-1]


def forced(setup: Setup, *, beam: int, precision: str = "auto") -> dict[str, Any]:
    """Sentences per second at a fixed output length, by a model with random weights."""
    tokenizer = Tokenizer.load(setup.text("tokenizer.json"))
    config = RunConfig.model_validate(setup.run_settings(setup.work, max_steps=1))
    torch.manual_seed(1)
    model = Transformer(config.model, tokenizer.size, tokenizer.size).eval()
    source, target = setup.languages
    meta = {"source_lang": source, "target_lang": target, "max_length": config.data.max_length}
    bundle = ModelBundle(model, tokenizer, tokenizer, meta, Path(setup.work))
    torch.set_num_threads(setup.threads)
    translator = in_precision(precision, lambda: Translator(bundle, setup.device, precision))
    options = TranslateOptions(
        beam=beam, min_length=TOKENS - 1, max_length=TOKENS, batch_size=BATCH_SENTENCES
    )
    found = timed(setup, translator, test_lines(setup), options)
    del found["texts"]
    return found


def in_precision(precision: str, make: Callable[[], Translator]) -> Translator:
    """The translator; BenchError when this version does not know the precision."""
    try:
        return make()
    except KeyError:
        raise BenchError(f"mttrain has no precision {precision} in this version") from None


def timed(
    setup: Setup, translator: Translator, lines: list[str], options: TranslateOptions
) -> dict[str, Any]:
    """Sentences and tokens per second of one pass over the lines."""
    synchronise(translator.device)
    start = time.perf_counter()
    found = list(translator.translate_lines(lines, options))
    synchronise(translator.device)
    seconds = time.perf_counter() - start
    tokens = sum(len(t.hypotheses[0].tokens) + t.hypotheses[0].finished for t in found)
    return {
        "rate": len(lines) / seconds,
        "tokens_rate": tokens / seconds,
        "tokens": tokens / len(lines),
        "seconds": round(seconds, 2),
        "device_mb": device_peak(setup),
        "texts": [t.text for t in found],
    }


class PlainStepper:
    """The model's own forward over the whole prefix at each step: nothing kept, nothing prepared.

    What the prepared path of decoding is held against. The state is the source [R, S] and the
    tokens so far [R, t].
    """

    def __init__(self, model: Transformer, dtype: torch.dtype) -> None:
        self.model, self.vocab_size = model, model.lm_head.out_features

    def start(self, src: Tensor) -> tuple[Tensor, Tensor]:
        return src, src[:, :0]

    def step(self, tokens: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Any]:
        source, past = state
        past = torch.cat([past, tokens[:, None]], 1)
        logits = self.model.project(self.model(source, past)[:, -1])
        return torch.log_softmax(logits, -1, dtype=torch.float32), (source, past)

    def reorder(
        self, state: tuple[Tensor, Tensor], rows: Tensor, kept: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return state[0][rows], state[1][rows]


def natural(
    setup: Setup, *, model: str, precision: str, beams: list[int], sizes: list[int]
) -> dict[str, Any]:
    """Speed over batch sizes (0 = the default batches) and BLEU of a trained run.

    precision "plain": float32 by `PlainStepper`.
    """
    lines, references = test_lines(setup), test_lines(setup, "tgt")
    device = choose_device(setup.device)
    if precision == "plain":
        translator = Translator(load_model(model, device), device, "fp32", PlainStepper)
    else:
        translator = in_precision(
            precision, lambda: Translator.load(model, device=setup.device, precision=precision)
        )
    rows = []
    for beam in beams:
        for size in sizes:
            options = TranslateOptions(beam=beam, batch_size=size or None)
            row = timed(setup, translator, lines, options)
            texts = row.pop("texts")
            (bleu,) = score_corpus(texts, [references], lang=setup.languages[1], metrics=["bleu"])
            rows.append({"beam": beam, "batch": size, "bleu": bleu.value, **row})
    return {"rows": rows, "signature": bleu.signature}


def forbid_end(setup: Setup, *, model: str, output: str) -> dict[str, Any]:
    """Write a Marian model whose end symbol has no chance; types that are equal stay equal."""
    with np.load(model) as parts:
        arrays = dict(parts)
    arrays["decoder_ff_logit_out_b"][0, 0] = -1e6  # the end symbol is word 0
    np.savez(output, **arrays)
    return {}


TASKS = (train, bound, forced, forbid_end, natural)


if __name__ == "__main__":
    sys.exit(answer(TASKS))
