"""mttrain: train, run and score Transformers for machine translation.

The public names are loaded on first use (PEP 562), so that `import mttrain` stays free of torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what a type checker sees; the table below is what runs
    from mttrain.config import RunConfig as RunConfig
    from mttrain.config import load_config as load_config
    from mttrain.errors import MttrainError as MttrainError
    from mttrain.metrics import compare_systems as compare_systems
    from mttrain.metrics import score_corpus as score_corpus
    from mttrain.model import Transformer as Transformer
    from mttrain.tokenizer import Tokenizer as Tokenizer
    from mttrain.tokenizer import train_tokenizer as train_tokenizer
    from mttrain.trainer import train as train
    from mttrain.translator import TranslateOptions as TranslateOptions
    from mttrain.translator import Translation as Translation
    from mttrain.translator import Translator as Translator

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
    "compare_systems": "metrics",
    "MttrainError": "errors",
}

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(f"mttrain.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module 'mttrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
