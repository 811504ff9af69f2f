"""Fixtures shared by several test files; heavy imports stand inside, to keep quick tests quick."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("mttrain", deadline=None)  # a busy machine is no fault
settings.load_profile("mttrain")


@pytest.fixture
def files(tmp_path: Path) -> Callable[..., str]:
    """Write lines to a file of the test's directory and return its path."""

    def write(name: str, lines: list[str] | bytes) -> str:
        data = lines if isinstance(lines, bytes) else "".join(f"{x}\n" for x in lines).encode()
        (tmp_path / name).write_bytes(data)
        return str(tmp_path / name)

    return write


@pytest.fixture(scope="session")
def random_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory whose only checkpoint is an untrained model of 16 dimensions (read-only)."""
    import torch

    from mttrain.checkpoint import Index, save_checkpoint, write_index
    from mttrain.config import ModelConfig
    from mttrain.model import Transformer
    from mttrain.tokenizer import train_tokenizer

    run = tmp_path_factory.mktemp("random_run")
    words = ["the", "small", "house", "dog", "runs", "ein", "kleines", "Haus", "Hund", "läuft"]
    text = [f"{a} {b} {c}." for a in words for b in words for c in words[:3]]
    tokenizer = train_tokenizer(text, vocab_size=300)
    tokenizer.save(run / "tokenizer.json")
    config = ModelConfig(
        d_model=16, d_ff=32, num_heads=2, encoder_layers=1, decoder_layers=1, dropout=0.0
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = Transformer(config, tokenizer.size, tokenizer.size)
    meta = {
        "source_lang": "en",
        "target_lang": "de",
        "max_length": 64,
        "decode": {"beam": 2, "length_penalty": 0.5, "max_length": 12},
    }
    path = save_checkpoint(run, 1, model, meta, (tokenizer, tokenizer), None)
    write_index(run, Index().added(path.name, {"bleu": 1.0}))
    return run
