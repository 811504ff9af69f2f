"""mttrain: train, run and score Transformers for machine translation.

The public names are loaded on first use (PEP 562), so that `import mttrain` stays free of torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "Translator": "translator",
    "TranslateOptions": "translator",
    "Translation": "translator",
    "Tokenizer": "tokenizer",
    "train_tokenizer": "tokenizer",
    "Transformer": "model",
    "RunConfig": "config",
    "load_config": "config",
    "train": "trainer",
    "score_corpus": "metrics",
    "MttrainError": "errors",
}

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(f"mttrain.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module 'mttrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
