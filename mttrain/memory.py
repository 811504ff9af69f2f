"""How much memory training takes: what each part of it holds, from the sizes alone.

Weights, gradients, AdamW's two moments and a running mean are exact. Activations are what autograd
keeps between forward and backward: exact too for the paths of a GPU (fused attention, plain linear
layers), and for those of a CPU in float64; in float32 the room behind the rows (`linear`) adds up
to an eighth. What is alive for a moment only, logits of a chunk and gradients on their way, is an
upper estimate. Not counted: the context of the device (some hundred MB on CUDA), and the holes that
an allocator leaves between blocks. `batch_tokens: auto` measures instead.

Dropout masks take nothing: backward makes them again (`dropout`).

Shapes: B rows of a batch, S source and T target positions, N = B S or B T, D d_model, F d_ff,
H heads, V types of the target.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import Literal, NamedTuple

import torch

from mttrain.attention import SHORT, VECTOR
from mttrain.config import ModelConfig
from mttrain.loss import CHUNK_ELEMENTS_CPU, CHUNK_ELEMENTS_DEVICE, chunk_rows
from mttrain.model import Transformer

WIDE = 4  # bytes of a float32, in which weights, moments and what lies between products are kept
_ID = 8  # bytes of an index
Kernel = Literal["fused", "explicit", "short"]


class BatchShape(NamedTuple):
    """A padded batch: B rows of S and T positions."""

    rows: int
    source: int
    target: int


class Sizes(NamedTuple):
    """Numbers of parameters, tied ones once: of all, of a layer of each stack, of all tensors."""

    total: int
    encoder_layer: int
    decoder_layer: int
    tensors: int

    @classmethod
    @cache
    def of(cls, model: ModelConfig, source_vocab: int, target_vocab: int) -> Sizes:
        """Counted on a model without data."""
        with torch.device("meta"):
            built = Transformer(model, source_vocab, target_vocab)
        stacks = (stack.layers[0].parameters() for stack in (built.encoder, built.decoder))
        encoder, decoder = (sum(parameter.numel() for parameter in layer) for layer in stacks)
        return cls(built.parameter_count(), encoder, decoder, len(list(built.parameters())))


@dataclass(frozen=True)
class Memory:
    """Bytes of one process. average: the running mean of `train.ema`; copies: of weights, joined,
    in another type, or gathered from other processes; working: alive for a moment only; whole: the
    gathered weights of a sharded model, at validations and checkpoints, in place of these three."""

    weights: int
    gradients: int
    moments: int
    average: int
    copies: int
    activations: int
    working: int
    whole: int = 0

    @property
    def total(self) -> int:
        """The most that is there at a time."""
        state = self.weights + self.gradients + self.moments + self.average
        return state + max(self.copies + self.activations + self.working, self.whole)

    def text(self) -> str:
        """One line: the total and its parts, in MB or GB."""
        parts = (f"{f.name} {readable(getattr(self, f.name))}" for f in fields(self)[:-1])
        kept = ", ".join(part for part in parts if not part.endswith(" 0 MB"))
        apart = f"; or whole weights {readable(self.whole)} in place of the last"
        return f"{readable(self.total)}: {kept}{apart if self.whole else ''}"


def readable(size: float) -> str:
    """Bytes as MB or GB (powers of ten)."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


@dataclass(frozen=True)
class Setting:
    """What of a run decides about its memory.

    wide, narrow: bytes of a number between products, and inside them (2 under autocast); kernel: of
    attention, `attention_kernel`; shards: processes that share weights, gradients and moments;
    recompute: layers keep their input alone (activation checkpointing); large_chunks: of logits, as
    on a GPU.
    """

    model: ModelConfig
    source_vocab: int
    target_vocab: int
    wide: int = WIDE
    narrow: int = WIDE
    kernel: Kernel = "fused"
    rdrop: bool = False
    ema: bool = False
    shards: int = 1
    recompute: bool = False
    large_chunks: bool = True

    @property
    def passes(self) -> int:
        """How often a batch goes through the model."""
        return 2 if self.rdrop else 1


def attention_kernel(model: ModelConfig, on_cpu: bool, shape: BatchShape) -> Kernel:
    """How attention of such a batch is computed in training in full precision; see `attention`."""
    if on_cpu and max(shape.source, shape.target) <= SHORT:
        return "short"
    return "explicit" if model.attention_dropout > 0 else "fused"


def training_memory(setting: Setting, shape: BatchShape) -> Memory:
    """Of an update on such a batch whose target positions all have a loss."""
    sizes = Sizes.of(setting.model, setting.source_vocab, setting.target_vocab)
    weights = -(-sizes.total // setting.shards) * WIDE
    return Memory(
        weights=weights,
        gradients=weights,
        moments=2 * weights + WIDE * sizes.tensors,
        average=weights if setting.ema else 0,
        copies=weight_copies(setting) + _gathered(setting, sizes),
        activations=saved_activations(setting, shape),
        working=_working(setting, shape),
        whole=WIDE * sizes.total if setting.shards > 1 else 0,
    )


def _gathered(setting: Setting, sizes: Sizes) -> int:
    """What fully sharded training holds beside the shards: the tensors of no layer, and two layers,
    the running and the next one; each in float32, as are the gradients."""
    if setting.shards == 1:
        return 0
    model = setting.model
    layers = model.encoder_layers * sizes.encoder_layer + model.decoder_layers * sizes.decoder_layer
    gathered = sizes.total - layers + 2 * max(sizes.encoder_layer, sizes.decoder_layer)
    return 2 * WIDE * gathered


def weight_copies(setting: Setting) -> int:
    """Copies of weights that autograd keeps: joined projections, and all matrices under autocast.

    Under sharding and recomputation those of one layer at a time.
    """
    model, d = setting.model, setting.model.d_model
    matrices = 3 if model.activation == "swiglu" else 2
    cast = setting.narrow != setting.wide
    encoder, decoder = 3 * d * d, 5 * d * d  # q, k, v; and once more k, v
    if cast:  # out projection and feed-forward; in the decoder also q and out of cross-attention
        encoder += d * d + matrices * d * model.d_ff
        decoder += 3 * d * d + matrices * d * model.d_ff
    if setting.recompute:
        return setting.narrow * max(encoder, decoder)
    return setting.narrow * (model.encoder_layers * encoder + model.decoder_layers * decoder)


def saved_activations(setting: Setting, shape: BatchShape) -> int:
    """Bytes that autograd keeps between forward and backward, beside copies of weights."""
    model, wide, narrow = setting.model, setting.wide, setting.narrow
    rows = shape.rows * setting.passes
    sides = rows * shape.source, rows * shape.target
    total = narrow * sides[0] * model.d_model  # what the encoder says
    if narrow != wide:  # cast once for each layer; computed again, of each layer's input
        more = wide if setting.recompute else narrow * (model.decoder_layers - 1)
        total += more * sides[0] * model.d_model
    layers = _encoder_layer(setting, shape), _decoder_layer(setting, shape)
    counts = model.encoder_layers, model.decoder_layers
    if setting.recompute:
        inputs = sum(wide * n * count for n, count in zip(sides, counts, strict=True))
        total += inputs * model.d_model + max(layers)
    else:
        total += sum(layer * count for layer, count in zip(layers, counts, strict=True))
    for positions in sides:
        if model.norm == "pre":  # the last norm of a stack
            total += _norm(setting, positions)
        if model.word_dropout:
            total += wide * positions
    # Token numbers and places, the masks of padding, and both gradients of the output projection.
    total += _ID * (sides[0] + sides[1] + shape.rows * shape.target)
    total += 2 * narrow * sides[0] if setting.kernel == "fused" else 0
    total += narrow * sides[1] * model.d_model
    return total + wide * setting.target_vocab * model.d_model


def _norm(setting: Setting, positions: int) -> int:
    """A layer norm keeps its input, and mean and deviation of each position."""
    return setting.wide * positions * (setting.model.d_model + 2)


def _feed_forward(setting: Setting, positions: int) -> int:
    """Input of the first product, what lies between the two, and the norm."""
    model, narrow = setting.model, setting.narrow
    hidden = {"relu": 1, "gelu": 2, "swiglu": 4}[model.activation]
    if model.activation_dropout and model.activation == "relu":  # its result is its own record
        hidden += 1
    inputs = 2 if model.activation == "swiglu" and narrow != setting.wide else 1
    inner = narrow * positions * (inputs * model.d_model + hidden * model.d_ff)
    return inner + _norm(setting, positions)


def _attention(setting: Setting, rows: int, queries: int, keys: int) -> int:
    """Queries, keys and values, what goes into the out projection, what attention itself keeps."""
    model, narrow = setting.model, setting.narrow
    width = max(VECTOR, keys) if setting.kernel == "short" else keys
    inner = narrow * rows * model.d_model * (2 * queries + 2 * width)
    heads = rows * model.num_heads * queries
    kept = {
        "fused": heads * setting.wide,  # the logarithm of each softmax's divisor
        # Weights before dropout, in the type of a softmax, and after it.
        "explicit": (setting.wide + narrow) * heads * keys,
        "short": narrow * heads * width,
    }
    return inner + kept[setting.kernel]


def _encoder_layer(setting: Setting, shape: BatchShape) -> int:
    rows, s = shape.rows * setting.passes, shape.source
    inputs = setting.narrow * rows * s * setting.model.d_model
    own = _attention(setting, rows, s, s) + _norm(setting, rows * s)
    return inputs + own + _feed_forward(setting, rows * s)


def _decoder_layer(setting: Setting, shape: BatchShape) -> int:
    rows, s, t = shape.rows * setting.passes, shape.source, shape.target
    inputs = 2 * setting.narrow * rows * t * setting.model.d_model  # of self- and cross-attention
    attention = _attention(setting, rows, t, t) + _attention(setting, rows, t, s)
    norms = 2 * _norm(setting, rows * t)
    return inputs + attention + norms + _feed_forward(setting, rows * t)


def _working(setting: Setting, shape: BatchShape) -> int:
    """The larger of what the loss holds of one chunk and what backward holds of one layer."""
    model, passes = setting.model, setting.passes
    elements = CHUNK_ELEMENTS_DEVICE if setting.large_chunks else CHUNK_ELEMENTS_CPU
    chunk = chunk_rows(elements, setting.target_vocab * passes)
    logits = passes * min(chunk, shape.rows * shape.target) * setting.target_vocab
    # Logits, probabilities and the gradient in the type of the product; R-Drop's two more.
    loss = logits * (2 * setting.wide + setting.narrow + (2 * setting.wide if passes > 1 else 0))
    positions = passes * shape.rows * max(shape.source, shape.target)
    backward = positions * (3 * setting.wide * model.d_model + 2 * setting.narrow * model.d_ff)
    return max(loss, backward)
