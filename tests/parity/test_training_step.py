"""Two hundred updates, each held against the plainest way to compute it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mttrain import attention, loss
from mttrain.config import ModelConfig, OptimConfig
from mttrain.dataset import Batch
from mttrain.model import Transformer
from mttrain.optim import build_optimizer
from mttrain.update import StepModule

VOCAB, ROWS, CELLS = 300, 12, 90


def copying_batch(update: int) -> Batch:
    """Random sentences of 3 to 21 ids, and the same ids backwards as their translation."""
    generator = torch.Generator().manual_seed(update)
    lengths = torch.randint(3, 22, (ROWS,), generator=generator).tolist()
    rows = [torch.randint(4, VOCAB, (n,), generator=generator) for n in lengths]
    end, begin = torch.tensor([3]), torch.tensor([2])

    def padded(parts: list[list[Tensor]]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence([torch.cat(p) for p in parts], batch_first=True)

    count = sum(lengths) + len(lengths)
    return Batch(
        padded([[row, end] for row in rows]),
        padded([[begin, row.flip(0)] for row in rows]),
        padded([[row.flip(0), end] for row in rows]),
        list(range(ROWS)),
        count,
        count,
    )


def plain(model: Transformer, batch: Batch) -> Tensor:
    """The whole batch at once, attention and cross-entropy of the library."""
    logits = model.project(model(batch.source, batch.target_in))
    return F.cross_entropy(
        logits.flatten(0, 1), batch.target_out.flatten(), ignore_index=0, label_smoothing=0.1
    )


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_every_update_has_the_loss_and_gradients_of_the_plain_path(
    monkeypatch: pytest.MonkeyPatch, norm: str
) -> None:
    """Short attention, chunked loss and parts of a batch are ways to compute, not other sums."""
    torch.manual_seed(3)
    config = ModelConfig(
        d_model=32, d_ff=48, num_heads=4, encoder_layers=1, decoder_layers=1, dropout=0.0, norm=norm
    )  # type: ignore[call-arg]
    model = Transformer(config, VOCAB, VOCAB)
    step = StepModule(model, smoothing=0.1)
    optimizer = build_optimizer(model, OptimConfig(lr=3e-3))
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS_CPU", 64 * VOCAB)
    for update in range(200):
        batch = copying_batch(update)
        with monkeypatch.context() as patch:
            patch.setattr(attention, "SHORT", 0)
            wanted = plain(model, batch)
            gradients = torch.autograd.grad(wanted, list(model.parameters()))
        optimizer.zero_grad()
        total = 0.0
        for part in batch.parts(CELLS):
            sums = step(part.source, part.target_in, part.target_out)
            (sums.smoothed / batch.target_tokens).backward()
            total += sums.smoothed.item() / batch.target_tokens
        assert total == pytest.approx(wanted.item(), rel=1e-5)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            assert parameter.grad is not None
            off = torch.linalg.vector_norm(parameter.grad - gradient)
            # The biases of keys have no effect: their gradient is rounding, 1e-7 of the others.
            assert off <= 1e-4 * torch.linalg.vector_norm(gradient) + 1e-6, update
        optimizer.step()
