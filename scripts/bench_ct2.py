"""Decoding with CTranslate2, run by the Python of its environment: needs ctranslate2 and numpy.

The model is written from random numbers in the sizes that were asked for: at a fixed output length
the weights do not change the speed.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
from bench_setup import BATCH_SENTENCES, TOKENS, Setup
from ctranslate2.specs import TransformerSpec, common_spec


def write_model(setup: Setup, path: Path) -> None:
    """A CTranslate2 model directory with random weights; embeddings are one matrix."""
    size, draw = setup.model, np.random.default_rng(1)
    words = Path(setup.text("dict.joeynmt.txt")).read_text(encoding="utf-8").split()
    spec = TransformerSpec.from_config(
        size.layers, size.heads, pre_norm=False, activation=common_spec.Activation.RELU
    )
    embedding = draw.normal(0, size.d_model**-0.5, (len(words), size.d_model)).astype(np.float32)

    def linear(spec: Any, rows: int, columns: int) -> None:
        scale = (2 / (rows + columns)) ** 0.5
        spec.weight = draw.normal(0, scale, (rows, columns)).astype(np.float32)
        spec.bias = np.zeros(rows, dtype=np.float32)

    def norm(spec: Any) -> None:
        spec.gamma, spec.beta = np.ones(width, np.float32), np.zeros(width, np.float32)

    width = size.d_model
    for side in (spec.encoder, spec.decoder):
        embeddings = side.embeddings if side is spec.decoder else side.embeddings[0]
        embeddings.weight = embedding
        side.scale_embeddings = True
        side.position_encodings.encodings = positions(512, width)
        for layer in side.layer:
            attentions = [(layer.self_attention, (3 * width, width))]
            if side is spec.decoder:
                attentions.append((layer.attention, (width, 2 * width, width)))
            for attention, rows in attentions:
                for part, count in zip(attention.linear, rows, strict=True):
                    linear(part, count, width)
                norm(attention.layer_norm)
            linear(layer.ffn.linear_0, size.d_ff, width)
            linear(layer.ffn.linear_1, width, size.d_ff)
            norm(layer.ffn.layer_norm)
    spec.decoder.projection.weight = embedding
    spec.register_source_vocabulary(words)
    spec.register_target_vocabulary(words)
    spec.validate()
    path.mkdir(parents=True, exist_ok=True)
    spec.save(str(path))


def positions(count: int, width: int) -> Any:
    """Sines in the first half of the columns, cosines in the second: as this program wants them."""
    angle = np.arange(count)[:, None] * np.exp(
        np.arange(width // 2) * -(np.log(10000.0) / (width // 2 - 1))
    )
    return np.concatenate([np.sin(angle), np.cos(angle)], axis=1).astype(np.float32)


def main() -> int:
    """Translate the test text once; prints one JSON line."""
    setup, arguments = Setup.from_json(sys.argv[1]), json.loads(sys.argv[2])
    model = Path(arguments["model"])
    if not (model / "model.bin").exists():
        write_model(setup, model)
    translator = ctranslate2.Translator(
        str(model),
        device=setup.device,
        compute_type=arguments["compute_type"],
        inter_threads=1,
        intra_threads=setup.threads,
    )
    text = Path(setup.text("test.tok.src")).read_text(encoding="utf-8")
    lines = [line.split() for line in text.split("\n")[:-1]]
    start = time.perf_counter()
    found = translator.translate_batch(
        lines,
        beam_size=arguments["beam"],
        max_batch_size=BATCH_SENTENCES,
        min_decoding_length=TOKENS - 1,
        max_decoding_length=TOKENS,
    )
    seconds = time.perf_counter() - start
    # An output ends with the end symbol, which is not in it, or at the limit.
    tokens = sum(min(len(answer.hypotheses[0]) + 1, TOKENS) for answer in found)
    answer = {
        "rate": len(lines) / seconds,
        "tokens": tokens / len(lines),
        "seconds": round(seconds, 2),
    }
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
