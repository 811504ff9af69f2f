"""The encoder-decoder Transformer of "Attention Is All You Need" (Vaswani et al. 2017).

Post-norm as in the paper or pre-norm (with a final layer norm on each stack); sinusoidal or learned
positions; embeddings tied over all three matrices, on the target side, or not at all. Parameter
names are those of Hugging Face's BART family, so that export is renaming.

Price: a training step is dominated by the matrix products (about 6 FLOPs per parameter and token);
decoding runs the same weights step by step in `inference`.

Shapes: B sentences, S source length, T target length, N rows being decoded (B x beam), D d_model,
H heads, E = D / H head width, F d_ff, V vocabulary, L layers.
Masks: True = may attend.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mttrain.attention import Attention
from mttrain.config import ModelConfig
from mttrain.dropout import DropoutKeys, KeyedDropout
from mttrain.linear import linear, with_room
from mttrain.masks import mask_bias


def sinusoidal_positions(start: int, length: int, d_model: int) -> Tensor:
    """Position table [length, D] for positions start .. start+length-1, float32.

    Column 2i is sin, column 2i+1 is cos, of pos / 10000^(2i/D) (Vaswani et al. 2017, section 3.5).
    An odd D ends with a sine. Angles are computed in float64, since position times frequency
    loses digits in lower precision, and rounded once. The table is on the CPU.
    """
    cpu = torch.device("cpu")
    position = torch.arange(start, start + length, dtype=torch.float64, device=cpu)
    frequency = torch.exp(
        torch.arange(0, d_model, 2, dtype=torch.float64, device=cpu)
        * (-math.log(10000.0) / d_model)
    )
    angle = position[:, None] * frequency  # [length, ceil(D/2)]
    table = torch.empty(length, d_model, dtype=torch.float32, device=cpu)
    table[:, 0::2] = torch.sin(angle)
    table[:, 1::2] = torch.cos(angle[:, : d_model // 2])
    return table


def _embedding(rows: int, d_model: int) -> nn.Embedding:
    """`rows` vectors with entries of variance 1 / D, so that times sqrt(D) they have variance 1.

    Without data (device "meta") nothing is drawn: for that torch would import its compiler.
    """
    weight = torch.empty(rows, d_model)
    if weight.is_meta:
        return nn.Embedding.from_pretrained(weight)  # type: ignore
    embedding = nn.Embedding(rows, d_model)
    nn.init.normal_(embedding.weight, std=d_model**-0.5)
    return embedding


class Layer(nn.Module):
    """What encoder and decoder layers share: feed-forward block, dropout, and the norm order.

    `trained_by` stands for `compute` in training: the same function compiled, or computed again in
    backward; see `compiling`.
    """

    trained_by: Callable[..., Tensor] | None = None

    def __init__(self, config: ModelConfig, keys: DropoutKeys) -> None:
        super().__init__()
        self.pre_norm = config.norm == "pre"
        self.activation = config.activation
        self.self_attn = Attention(config, keys)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model, config.layer_norm_eps)
        self.self_attn_dropout = KeyedDropout(config.dropout, keys)
        self.fc1 = nn.Linear(config.d_model, config.d_ff)
        self.fc2 = nn.Linear(config.d_ff, config.d_model)
        if self.activation == "swiglu":
            self.fc3 = nn.Linear(config.d_model, config.d_ff)
        self.activation_dropout = KeyedDropout(config.activation_dropout, keys)
        self.final_layer_norm = nn.LayerNorm(config.d_model, config.layer_norm_eps)
        self.final_dropout = KeyedDropout(config.dropout, keys)
        for name, module in self.named_children():
            if name.startswith("fc") and isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def before(self, x: Tensor, norm: nn.LayerNorm) -> Tensor:
        """Input of a sub-layer: normalised under pre-norm, plain under post-norm."""
        return with_room(norm(x)) if self.pre_norm else x

    def after(self, x: Tensor, out: Tensor, norm: nn.LayerNorm, dropout: KeyedDropout) -> Tensor:
        """Residual sum around a sub-layer; under post-norm normalised (section 3.1)."""
        total = dropout.add(x, out)
        return total if self.pre_norm else with_room(norm(total))

    def feed_forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D] with residual: section 3.3; swiglu after Shazeer 2020."""
        inner = self.before(x, self.final_layer_norm)
        hidden = linear(inner, self.fc1.weight, self.fc1.bias, relu=self.activation == "relu")
        if self.activation == "gelu":
            hidden = F.gelu(hidden)
        elif self.activation == "swiglu":
            hidden = F.silu(hidden) * linear(inner, self.fc3.weight, self.fc3.bias)
        out = linear(self.activation_dropout(hidden), self.fc2.weight, self.fc2.bias)
        return self.after(x, out, self.final_layer_norm, self.final_dropout)

    def forward(self, *inputs: Tensor | None) -> Tensor:
        """What `compute` gives for these inputs."""
        if self.training and self.trained_by is not None:
            return self.trained_by(*inputs)
        return self.compute(*inputs)

    def compute(self, *inputs: Tensor | None) -> Tensor:
        """The layer: inputs as its kind takes them, the first [B, T, D] -> [B, T, D]"""
        raise NotImplementedError

    def compute_again(self, *inputs: Tensor | None) -> Tensor:
        """`compute`, of which backward keeps the inputs alone; for the compiler."""
        out = checkpoint(self.compute, *inputs, use_reentrant=False, preserve_rng_state=False)
        assert isinstance(out, Tensor)
        return out


class EncoderLayer(Layer):
    """Self-attention and feed-forward block."""

    def compute(self, x: Tensor, bias: Tensor | None) -> Tensor:  # type: ignore[override]
        """x [B, S, D], bias [B, 1, 1, S] -> [B, S, D]"""
        out = self.self_attn(self.before(x, self.self_attn_layer_norm), bias)
        x = self.after(x, out, self.self_attn_layer_norm, self.self_attn_dropout)
        return self.feed_forward(x)


class DecoderLayer(Layer):
    """Causal self-attention, cross-attention and feed-forward block."""

    def __init__(self, config: ModelConfig, keys: DropoutKeys) -> None:
        super().__init__(config, keys)
        self.encoder_attn = Attention(config, keys)
        self.encoder_attn_layer_norm = nn.LayerNorm(config.d_model, config.layer_norm_eps)
        self.encoder_attn_dropout = KeyedDropout(config.dropout, keys)

    def compute(  # type: ignore[override]
        self, x: Tensor, memory: Tensor, memory_bias: Tensor | None
    ) -> Tensor:
        """x [B, T, D], memory [B, S, D], memory_bias [B, 1, 1, S] -> [B, T, D]

        Padding stands at the end of a target, so the causal mask alone keeps real positions
        from seeing it.
        """
        out = self.self_attn(self.before(x, self.self_attn_layer_norm), None, causal=True)
        x = self.after(x, out, self.self_attn_layer_norm, self.self_attn_dropout)
        out = self.encoder_attn.cross(
            self.before(x, self.encoder_attn_layer_norm), memory, memory_bias
        )
        x = self.after(x, out, self.encoder_attn_layer_norm, self.encoder_attn_dropout)
        return self.feed_forward(x)


class Stack(nn.Module):
    """Embedding, positions and layers of one side."""

    position_table: Tensor

    def __init__(
        self, config: ModelConfig, vocab: int, layers: list[Layer], keys: DropoutKeys
    ) -> None:
        super().__init__()
        self.d_model = config.d_model
        self.scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        self.embed_tokens = _embedding(vocab, config.d_model)
        if config.positions == "learned":
            assert config.max_positions is not None  # held by the configuration's own checks
            self.embed_positions = _embedding(config.max_positions, config.d_model)
        else:
            table = sinusoidal_positions(0, 256, config.d_model).to(self.embed_tokens.weight.device)
            self.register_buffer("position_table", table, persistent=False)
        self.dropout = KeyedDropout(config.dropout, keys)
        # A number among the call sites only where it is used: so that other masks stay as they are.
        self.word_dropout = KeyedDropout(config.word_dropout, keys) if config.word_dropout else None
        self.layers = nn.ModuleList(layers)
        if config.norm == "pre":
            self.layer_norm = nn.LayerNorm(config.d_model, config.layer_norm_eps)

    def positions(self, start: int, length: int) -> Tensor:
        """Rows start .. start+length-1 of the position table: [length, D]"""
        end = start + length
        if hasattr(self, "embed_positions"):
            limit = self.embed_positions.num_embeddings
            if end > limit:
                raise ValueError(f"position {end} is beyond the {limit} learned positions")
            return self.embed_positions.weight[start:end]
        table = self.position_table
        if end > table.shape[0]:
            # Any length: rows are computed when they are first needed, in float32; what decoding
            # makes here may be used in training later.
            with torch.inference_mode(False):
                grown = sinusoidal_positions(0, max(end, 2 * table.shape[0]), self.d_model)
                table = self.position_table = grown.to(table.device, table.dtype)
        return table[start:end]

    def embed(self, tokens: Tensor, start: int = 0) -> Tensor:
        """tokens [B, T] at positions start.. -> [B, T, D], scaled by sqrt(D) once (section 3.4).

        Word dropout takes whole vectors away, their positions stay (Sennrich et al. 2016, Edinburgh
        Neural Machine Translation Systems for WMT 16, section 2.4).
        """
        embedded = self.embed_tokens(tokens) * self.scale
        if self.word_dropout is not None:
            embedded = self.word_dropout.rows(embedded)
        return with_room(self.dropout(embedded + self.positions(start, tokens.shape[1])))

    def normalised(self, x: Tensor) -> Tensor:
        """The final layer norm of a pre-norm stack; a post-norm stack ends normalised."""
        return with_room(self.layer_norm(x)) if hasattr(self, "layer_norm") else x


class Transformer(nn.Module):
    """Encoder, decoder and output projection.

    `source_vocab` and `target_vocab` are sizes; under tie "all" they must be equal. `pad_id` is
    the source id that no position attends to.
    """

    def __init__(
        self, config: ModelConfig, source_vocab: int, target_vocab: int, pad_id: int = 0
    ) -> None:
        super().__init__()
        if config.tie == "all" and source_vocab != target_vocab:
            raise ValueError("tying all embeddings needs one vocabulary for both sides")
        self.config = config
        self.pad_id = pad_id
        keys = self.dropout_keys = DropoutKeys()
        self.encoder = Stack(
            config,
            source_vocab,
            [EncoderLayer(config, keys) for _ in range(config.encoder_layers)],
            keys,
        )
        self.decoder = Stack(
            config,
            target_vocab,
            [DecoderLayer(config, keys) for _ in range(config.decoder_layers)],
            keys,
        )
        self.lm_head = nn.Linear(config.d_model, target_vocab, bias=False)
        if not self.lm_head.weight.is_meta:
            nn.init.normal_(self.lm_head.weight, std=config.d_model**-0.5)
        if config.tie == "all":
            self.decoder.embed_tokens.weight = self.encoder.embed_tokens.weight
        if config.tie in ("all", "target"):
            self.lm_head.weight = self.decoder.embed_tokens.weight

    @property
    def max_positions(self) -> int | None:
        """The longest sequence that learned positions allow; None = any length."""
        return self.config.max_positions if self.config.positions == "learned" else None

    def parameter_count(self) -> int:
        """Number of parameters, tied ones counted once."""
        return sum(p.numel() for p in self.parameters())

    def source_mask(self, src: Tensor) -> Tensor:
        """src [B, S] -> boolean [B, S], True at real tokens."""
        return src != self.pad_id

    def _memory_bias(self, src_mask: Tensor) -> Tensor:
        # Built in the type that attention runs in: a float32 bias cast to float16 would overflow.
        kind, dtype = src_mask.device.type, self.lm_head.weight.dtype
        if kind != "meta" and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        return mask_bias(src_mask, dtype)[:, None, None, :]  # [B, 1, 1, S]

    def encode(self, src: Tensor, src_mask: Tensor) -> Tensor:
        """src [B, S] token ids, src_mask [B, S] -> encoder output [B, S, D]"""
        bias = self._memory_bias(src_mask)
        x = self.encoder.embed(src)
        for layer in self.encoder.layers:
            x = layer(x, bias)
        return self.encoder.normalised(x)

    def decode(self, tgt_in: Tensor, memory: Tensor, src_mask: Tensor) -> Tensor:
        """tgt_in [B, T] (begins with BOS), memory [B, S, D] -> hidden states [B, T, D]"""
        bias = self._memory_bias(src_mask)
        x = self.decoder.embed(tgt_in)
        for layer in self.decoder.layers:
            x = layer(x, memory, bias)
        return self.decoder.normalised(x)

    def project(self, hidden: Tensor) -> Tensor:
        """hidden [..., D] -> logits [..., V]"""
        logits: Tensor = self.lm_head(hidden)
        return logits

    def forward(self, src: Tensor, tgt_in: Tensor) -> Tensor:
        """src [B, S], tgt_in [B, T] -> hidden states [B, T, D] before the output projection."""
        src_mask = self.source_mask(src)
        return self.decode(tgt_in, self.encode(src, src_mask), src_mask)
