"""What the comparison with transformers takes for a tie. The rest of it is in tests/parity."""

from __future__ import annotations

import torch

from mttrain.hfcheck import TOLERANCE, _is_tie, _Ours
from mttrain.tokenizer import EOS_ID


def test_a_tie_is_where_the_translations_part() -> None:
    """A wrong translation passed because two tokens were equally likely somewhere else in it."""
    item = _Ours("line", [7, EOS_ID], "text", [5, 6])
    logits = torch.zeros(3, 9)  # before 5, before 6, before EOS
    logits[0, 5] = logits[1, 6] = logits[2, EOS_ID] = 1.0
    logits[1, 8] = 1.0 - TOLERANCE
    assert _is_tie(item, logits, [5, 8, 4, EOS_ID])
    assert not _is_tie(item, logits, [5, 7, EOS_ID])
    assert not _is_tie(item, logits, [8, 6, EOS_ID])
    assert not _is_tie(item, logits, [5, 6, 4, EOS_ID])
    logits[2, 4] = 1.0
    assert _is_tie(item, logits, [5, 6, 4, EOS_ID])
    assert not _is_tie(item, logits, [5, 6, EOS_ID])  # the same ids: the text is wrong
    logits[1, 8] = torch.nan
    assert not _is_tie(item, logits, [5, 8, EOS_ID])
