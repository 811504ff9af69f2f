"""Training and decoding with transformers, run by the Python of its environment.

The model is MarianMT, the encoder-decoder of translation in that library; training is its
Seq2SeqTrainer, decoding its `generate`, both with random weights on the common text.

    python scripts/bench_hf.py train|decode SETUP ARGUMENTS
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from bench_setup import BATCH_SENTENCES, CLIP, RATE, SMOOTHING, TOKENS, WARMUP_STEPS, Setup
from transformers import (
    MarianConfig,
    MarianMTModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

PAD, BOS, EOS, SPECIAL = 0, 2, 3, 4  # ids; subword 123 of the text is the word "t123"
NO_LABEL = -100


def build(setup: Setup) -> MarianMTModel:
    """The model of the common architecture, untrained."""
    size = setup.model
    words = Path(setup.text("dict.onmt.txt")).read_text(encoding="utf-8").split()
    sides: dict[str, Any] = {}
    for side in ("encoder", "decoder"):
        sides[f"{side}_layers"], sides[f"{side}_ffn_dim"] = size.layers, size.d_ff
        sides[f"{side}_attention_heads"] = size.heads
    config = MarianConfig(
        vocab_size=len(words) + SPECIAL,
        d_model=size.d_model,
        **sides,
        dropout=size.dropout,
        attention_dropout=0.0,
        activation_dropout=0.0,
        activation_function="relu",
        scale_embedding=True,
        share_encoder_decoder_embeddings=True,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        decoder_start_token_id=BOS,
        forced_eos_token_id=None,
    )
    torch.manual_seed(1)
    return MarianMTModel(config)


def sentences(setup: Setup, name: str) -> list[list[int]]:
    """Ids of each line of a file of the common text, with the end symbol."""
    text = Path(setup.text(name)).read_text(encoding="utf-8")
    return [[int(word[1:]) for word in line.split()] + [EOS] for line in text.split("\n")[:-1]]


def padded(rows: list[list[int]], filler: int) -> torch.Tensor:
    """[B, longest]"""
    longest = max(map(len, rows))
    return torch.tensor([row + [filler] * (longest - len(row)) for row in rows])


def collate(pairs: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """A padded batch, as MarianMT wants it."""
    source = padded([pair["input_ids"] for pair in pairs], PAD)
    targets = [pair["labels"] for pair in pairs]
    return {
        "input_ids": source,
        "attention_mask": (source != PAD).long(),
        "decoder_input_ids": padded([[BOS, *target[:-1]] for target in targets], PAD),
        "labels": padded(targets, NO_LABEL),
    }


class Reporting(Seq2SeqTrainer):
    """Prints the target tokens of each update."""

    def compute_loss(self, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
        print(f"update of {int((inputs['labels'] != NO_LABEL).sum())} target tokens", flush=True)
        return super().compute_loss(model, inputs, *rest, **more)


def train(setup: Setup) -> None:
    """Until it is ended from outside. Its batches are rows: as many as give the common budget."""
    pairs = [
        {"input_ids": source, "labels": target}
        for source, target in zip(
            sentences(setup, "train.tok.src"), sentences(setup, "train.tok.tgt"), strict=True
        )
    ]
    longer = sum(max(len(pair["input_ids"]), len(pair["labels"])) for pair in pairs) / len(pairs)
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(setup.folder("transformers") / "run"),
        per_device_train_batch_size=max(1, round(setup.batch_tokens / longer)),
        label_smoothing_factor=SMOOTHING,
        learning_rate=RATE,
        adam_beta2=0.98,
        warmup_steps=WARMUP_STEPS,
        lr_scheduler_type="inverse_sqrt",
        max_grad_norm=CLIP,
        max_steps=10**6,
        train_sampling_strategy="group_by_length",
        remove_unused_columns=False,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=setup.device == "cpu",
        bf16=setup.device == "cuda",
    )
    random.Random(1).shuffle(pairs)
    trainer = Reporting(
        model=build(setup), args=arguments, train_dataset=pairs, data_collator=collate
    )
    trainer.train()


def decode(setup: Setup, beam: int) -> None:
    """Translate the test text once; prints one JSON line."""
    model = build(setup).eval().to(setup.device)
    rows = sorted(sentences(setup, "test.tok.src"), key=len)
    batches = [rows[at : at + BATCH_SENTENCES] for at in range(0, len(rows), BATCH_SENTENCES)]
    tokens = 0
    start = time.perf_counter()
    for batch in batches:
        source = padded(batch, PAD).to(setup.device)
        found = model.generate(
            input_ids=source,
            attention_mask=(source != PAD).long(),
            num_beams=beam,
            do_sample=False,
            min_new_tokens=TOKENS,
            max_new_tokens=TOKENS,
        )
        tokens += found[:, 1:].numel()  # without the begin symbol
    seconds = time.perf_counter() - start
    print(json.dumps({"rate": len(rows) / seconds, "tokens": tokens / len(rows)}))


def main() -> int:
    """See the head of the file."""
    setup = Setup.from_json(sys.argv[2])
    if sys.argv[1] == "train":
        train(setup)
    else:
        decode(setup, **json.loads(sys.argv[3]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
