"""The chunked loss against F.cross_entropy: value and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import mttrain.loss
from mttrain.linear import bfloat16_products
from mttrain.loss import consistent_loss, smoothed_loss


def random_case(rows: int = 37, d_model: int = 12, vocab: int = 29, pad_share: float = 0.3):
    torch.manual_seed(rows)
    hidden = torch.randn(3, rows, d_model, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(vocab, d_model, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(1, vocab, (3, rows))
    targets[torch.rand(3, rows) < pad_share] = 0
    return hidden, weight, targets


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.4])
@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_equals_cross_entropy(smoothing: float, chunk: int, monkeypatch) -> None:
    """M07: the announced smoothing must be the one used, in value and gradients, chunked or not."""
    monkeypatch.setattr(mttrain.loss, "CHUNK_ELEMENTS_CPU", chunk)
    hidden, weight, targets = random_case(rows=83)
    ours = smoothed_loss(hidden, weight, targets, smoothing)
    (ours.smoothed / 7).backward()
    grads = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    logits = (hidden @ weight.t()).flatten(0, 1)
    theirs = F.cross_entropy(
        logits, targets.flatten(), ignore_index=0, label_smoothing=smoothing, reduction="sum"
    )
    (theirs / 7).backward()
    torch.testing.assert_close(ours.smoothed, theirs)
    torch.testing.assert_close(grads[0], hidden.grad)
    torch.testing.assert_close(grads[1], weight.grad)
    plain = F.cross_entropy(logits, targets.flatten(), ignore_index=0, reduction="sum")
    torch.testing.assert_close(ours.nll, plain)
    real = targets != 0
    assert ours.tokens == int(real.sum())
    right = ((hidden @ weight.t()).argmax(-1) == targets) & real
    assert int(ours.correct) == int(right.sum())


def test_gradcheck() -> None:
    """The hand-written backward against finite differences."""
    hidden, weight, targets = random_case(rows=3, d_model=4, vocab=7)
    assert torch.autograd.gradcheck(
        lambda h, w: smoothed_loss(h, w, targets, 0.2).smoothed, (hidden, weight)
    )


def test_padding_changes_nothing() -> None:
    """M07: any amount of padding gives the same loss and gradients."""
    hidden, weight, targets = random_case(rows=10, pad_share=0.0)
    results = []
    for length in (10, 60):
        padded = torch.zeros(3, length, hidden.shape[-1], dtype=torch.float64)
        padded[:, :10] = hidden.detach()
        padded[:, 10:] = 1e3  # whatever stands at padded positions must not matter
        padded.requires_grad_(True)
        ids = torch.zeros(3, length, dtype=torch.int64)
        ids[:, :10] = targets
        weight.grad = None
        sums = smoothed_loss(padded, weight, ids, 0.1)
        sums.smoothed.backward()
        assert not padded.grad[:, 10:].any()
        results.append((sums.smoothed, padded.grad[:, :10], weight.grad, sums.tokens))
    assert results[0][3] == results[1][3] == 30
    for first, second in zip(results[0][:3], results[1][:3], strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_no_countable_token() -> None:
    """M20: a batch of padding alone gives 0 and a count of 0, never 0/0."""
    hidden, weight, _ = random_case(rows=4)
    sums = smoothed_loss(hidden, weight, torch.zeros(3, 4, dtype=torch.int64), 0.1)
    sums.smoothed.backward()
    assert sums.tokens == 0 and sums.smoothed.item() == 0.0 and sums.nll.item() == 0.0
    assert hidden.grad is not None and not hidden.grad.any()
    assert weight.grad is not None and not weight.grad.any()


@pytest.mark.parametrize("how", ["bfloat16", "float16", "bfloat16 products"])
def test_half_precision(how: str) -> None:
    """M02: the products run in half precision; weight, gradient and sums do not."""
    hidden, weight, targets = random_case()
    rows = hidden.detach().float().requires_grad_(True)
    full = weight.detach().float().requires_grad_(True)
    kind = how.split()[0]
    context = torch.autocast("cpu", dtype=getattr(torch, kind))
    with bfloat16_products() if how != kind else context:
        sums = smoothed_loss(rows, full, targets, 0.1)
    sums.smoothed.backward()
    exact = smoothed_loss(hidden, weight, targets, 0.1)
    exact.smoothed.backward()
    assert sums.smoothed.dtype == torch.float32 and full.grad.dtype == torch.float32
    assert sums.smoothed.item() != pytest.approx(exact.smoothed.item(), rel=1e-6)  # half was used
    assert sums.smoothed.item() == pytest.approx(exact.smoothed.item(), rel=0.02)
    torch.testing.assert_close(full.grad.double(), weight.grad, rtol=0.05, atol=0.1)


def test_no_gradients_are_computed_without_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation once paid for both gradients: no_grad cannot be seen inside autograd functions."""
    hidden, weight, targets = random_case()
    made = []
    monkeypatch.setattr(torch, "zeros_like", lambda *a, **k: made.append(a) or torch.zeros(1))
    with torch.no_grad():
        sums = smoothed_loss(hidden, weight, targets, 0.1)
    assert not made and not sums.smoothed.requires_grad


def two_passes(hidden: torch.Tensor) -> torch.Tensor:
    return torch.cat((hidden, hidden.flip(-1) * 0.7 + 0.1)).detach().requires_grad_(True)


@pytest.mark.parametrize("consistency", [0.5, 5.0])
@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_rdrop_equals_the_published_sum(consistency: float, chunk: int, monkeypatch) -> None:
    """The divergence once went one way only, and its gradient was chosen for another loss than the
    one that was logged: value and gradients against cross_entropy and kl_div."""
    monkeypatch.setattr(mttrain.loss, "CHUNK_ELEMENTS_CPU", chunk)
    hidden, weight, targets = random_case(rows=83)
    both = two_passes(hidden)
    ours = consistent_loss(both, weight, targets, 0.1, consistency)
    (ours.smoothed / 7).backward()
    grads = both.grad.clone(), weight.grad.clone()
    both.grad = weight.grad = None

    real = targets != 0
    first, second = (half[real] @ weight.t() for half in both.chunk(2))
    losses = [
        F.cross_entropy(z, targets[real], label_smoothing=0.1, reduction="sum")
        for z in (first, second)
    ]
    p, q = first.log_softmax(-1), second.log_softmax(-1)
    kl = F.kl_div(q, p, reduction="sum", log_target=True)
    kl = kl + F.kl_div(p, q, reduction="sum", log_target=True)
    published = sum(losses) + consistency / 2 * kl
    (published / 2 / 7).backward()
    torch.testing.assert_close(ours.smoothed, published / 2)
    torch.testing.assert_close(grads[0], both.grad)
    torch.testing.assert_close(grads[1], weight.grad)
    assert ours.tokens == int(real.sum())
    halves = [smoothed_loss(half, weight, targets, 0.1) for half in both.chunk(2)]
    torch.testing.assert_close(ours.nll, (halves[0].nll + halves[1].nll) / 2)
    torch.testing.assert_close(ours.correct, (halves[0].correct + halves[1].correct) / 2)
    with torch.no_grad():
        again = consistent_loss(both, weight, targets, 0.1, consistency)
    torch.testing.assert_close(again.smoothed, ours.smoothed)


def test_rdrop_of_equal_passes_is_the_plain_loss() -> None:
    """R-Drop must not change the size of the loss or of the gradient where both passes agree."""
    hidden, weight, targets = random_case(rows=9)
    plain = smoothed_loss(hidden, weight, targets, 0.1)
    plain.smoothed.backward()
    both = torch.cat((hidden, hidden)).detach().requires_grad_(True)
    wanted, weight.grad = weight.grad, None
    sums = consistent_loss(both, weight, targets, 0.1, 5.0)
    sums.smoothed.backward()
    torch.testing.assert_close(sums.smoothed, plain.smoothed)
    torch.testing.assert_close(weight.grad, wanted)
    torch.testing.assert_close(both.grad.chunk(2)[0] * 2, hidden.grad)


def test_rdrop_without_a_countable_token() -> None:
    """M20 again, for two passes."""
    hidden, weight, _ = random_case(rows=4)
    sums = consistent_loss(two_passes(hidden), weight, torch.zeros(3, 4, dtype=torch.int64), 0.1, 5)
    assert sums.tokens == 0 and sums.smoothed.item() == 0.0


def test_rdrop_gradcheck() -> None:
    """The hand-written backward against finite differences."""
    hidden, weight, targets = random_case(rows=3, d_model=4, vocab=7)
    assert torch.autograd.gradcheck(
        lambda h, w: consistent_loss(h, w, targets, 0.2, 3.0).smoothed,
        (two_passes(hidden), weight),
    )
