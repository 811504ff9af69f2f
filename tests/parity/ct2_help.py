"""Small random models that translate, for the tests of exports and engines."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import torch

from mttrain.checkpoint import save_checkpoint
from mttrain.config import ModelConfig
from mttrain.model import Transformer
from mttrain.tokenizer import BOS_ID, EOS_ID, Tokenizer

TEXT = "the small house dog runs ein kleines Haus Hund läuft schnell über den Fluß 我 们"
WORDS = TEXT.split()


def sentences(count: int, longest: int, seed: int = 1) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, longest))) for _ in range(count)]


def transformer(source: Tokenizer, target: Tokenizer | None = None, **settings: Any) -> Any:
    """Sharp random weights. With tie: none the end symbol is likely enough for some outputs to
    end, and what may not come out is as unlikely as in a trained model."""
    values: dict[str, Any] = {
        "d_model": 16, "d_ff": 24, "num_heads": 2, "encoder_layers": 2, "decoder_layers": 2,
        "dropout": 0.0, "tie": "none", "norm": "pre", **settings,
    }  # fmt: skip
    seed = values.pop("seed", 1)
    target = target or source
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = Transformer(ModelConfig(**values), source.size, target.size)
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                cross = "encoder_attn.v" in name or "encoder_attn.out" in name
                parameter.mul_(8.0 if cross else 3.0 if "layers" in name else 1.5)
            else:  # biases and norms, which are 0 and 1 at first
                parameter.add_(torch.randn_like(parameter) * 0.1)
        if values["tie"] == "none":
            last: Any = model.decoder if values["norm"] == "pre" else model.decoder.layers[-1]
            norm = last.layer_norm if values["norm"] == "pre" else last.final_layer_norm
            norm.bias.fill_(1.0)
            model.lm_head.weight.mul_(2.5 / 1.5)
            model.lm_head.weight[EOS_ID] = 0.54
            model.lm_head.weight[[0, 1, 2, *target.newline_ids]] = -1.0
    return model.eval()


def one_sentence(tokenizer: Tokenizer, text: str) -> Any:
    """A model that says this text (no token twice) whatever it reads, by a wide margin: rounding to
    8 bits would make something else of outputs that hang on every digit."""
    model = transformer(tokenizer, d_model=64)
    chain = [BOS_ID, *tokenizer.encode(text), EOS_ID]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("out_proj.weight", "fc2.weight", ".bias", "lm_head.weight")):
                parameter.mul_(1e-3)  # what is left of the decoder is the last token's embedding
        for token, following in itertools.pairwise(chain):
            direction = model.decoder.embed_tokens.weight[token]
            model.lm_head.weight[following] = direction / direction.norm()
    return model


def saved(
    folder: Path, model: Any, source: Tokenizer, target: Tokenizer | None = None, **meta: Any
) -> Path:
    """A checkpoint directory of the model."""
    known = {"source_lang": "en", "target_lang": "de", "max_length": 64, **meta}
    return save_checkpoint(folder, 1, model, known, (source, target or source), None)
