"""How many floating-point operations the matrix products of training take: an exact count.

Everything that multiplies matrices is counted: the linear layers, scores and contexts of attention,
the output projection. A product [N, in] x [in, out] is 2 N in out operations, a multiplication and
an addition for each term; its backward is two more of that size, so training takes three times the
forward pass (Kaplan et al. 2020, section 2.1, count the same but leave attention out). Not counted:
embeddings, norms, softmax, dropout, the optimiser, all of which move numbers instead of multiplying
matrices; and what is computed twice, such as attention weights inside a fused kernel or layers
under activation checkpointing: these are the FLOPs of the model, not of the machine (Chowdhery et
al. 2022, appendix B). The causal mask is not deducted: most kernels do not skip it.

For one model the count is a polynomial of the lengths, so a corpus of any size costs a few sums.

Shapes: S source and T target positions, D d_model, F d_ff, V types of the target vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from mttrain.config import ModelConfig

BACKWARD = 2  # products of backward for each one of the forward pass


class LengthSums(NamedTuple):
    """Sums over pairs of S source and T target positions: of S, T, S^2, T^2 and S T."""

    source: int
    target: int
    source_squared: int
    target_squared: int
    crossed: int

    @classmethod
    def of(cls, source: ArrayLike, target: ArrayLike) -> LengthSums:
        """Of pairs with these lengths, in subwords with EOS."""
        s, t = (np.asarray(side, dtype=np.int64) for side in (source, target))
        return cls(int(s.sum()), int(t.sum()), int(s @ s), int(t @ t), int(s @ t))


NO_WORK = LengthSums(0, 0, 0, 0, 0)


@dataclass(frozen=True)
class Products:
    """FLOPs of one forward pass: what each term of `LengthSums` costs, and each row of logits.

    passes: how often a batch goes through the model, 2 under R-Drop.
    """

    terms: LengthSums
    projection: int
    passes: int = 1

    def forward(self, sums: LengthSums, counted: int) -> int:
        """Of these positions; counted: targets that have a loss, which padding has not."""
        once = sum(a * b for a, b in zip(self.terms, sums, strict=True))
        return self.passes * (once + counted * self.projection)

    def training(self, sums: LengthSums) -> int:
        """Forward and backward, all target positions having a loss."""
        return (1 + BACKWARD) * self.forward(sums, sums.target)


def model_products(model: ModelConfig, target_vocab: int, *, rdrop: bool = False) -> Products:
    """The products of a model with so many target types; rdrop: training takes two passes."""
    d, encoder, decoder = model.d_model, model.encoder_layers, model.decoder_layers
    square = 2 * d * d  # a projection [D, D] of one position
    feed_forward = (3 if model.activation == "swiglu" else 2) * 2 * d * model.d_ff
    attend = 2 * 2 * d  # scores and context of one query and one key, all heads together
    terms = LengthSums(
        # Every decoder layer makes keys and values of the source.
        source=encoder * (4 * square + feed_forward) + decoder * 2 * square,
        target=decoder * (4 * square + 2 * square + feed_forward),
        source_squared=encoder * attend,
        target_squared=decoder * attend,
        crossed=decoder * attend,
    )
    return Products(terms, 2 * d * target_vocab, passes=2 if rdrop else 1)
