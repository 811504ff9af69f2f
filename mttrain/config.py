"""The settings of a run: typed, frozen, and checked as far as that needs no files.

`load_config` reads YAML and `--set` values and reports every problem at once, one line each, with
file, line and key (the wording is in `settings`, the YAML rules are in `yamlio`). A section built
in Python (`ModelConfig(d_model=64)`) makes the same checks and raises pydantic's ValidationError.
Precedence: defaults < YAML < `--set section.key=value`. A setting that would have no effect is
refused. Relative paths are relative to the working directory and are not touched here.

Cost: importing pydantic and building the classes, about 0.3 s; reading a file, milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mttrain.aliases import OTHER_NAMES
from mttrain.dataconfig import CorpusConfig as CorpusConfig
from mttrain.dataconfig import DataConfig as DataConfig
from mttrain.dataconfig import TokenizerConfig as TokenizerConfig
from mttrain.errors import ConfigError
from mttrain.settings import (
    BatchTokens,
    Betas,
    ClipNorm,
    Device,
    Duration,
    NotNegative,
    Positive,
    Problem,
    Section,
    Share,
    Text,
    Whole,
    check,
    seconds,
)
from mttrain.yamlio import (
    KeyPath,
    YamlProblem,
    dotted,
    dump_yaml,
    override,
    plain_tree,
    read_yaml,
)


class ModelConfig(Section):
    """The Transformer (Vaswani et al. 2017) and its usual variants."""

    # The bound keeps a made-up width from asking for gigabytes of positions before it is compared
    # with the tensors of its model.
    d_model: Annotated[Positive, Field(le=65_536)] = Field(
        128, description="width of the embeddings and layers"
    )
    d_ff: Positive = Field(256, description="inner width of the feed-forward blocks")
    num_heads: Positive = Field(4, description="attention heads; divides d_model")
    encoder_layers: Positive = Field(4, description="layers of the encoder")
    decoder_layers: Positive = Field(4, description="layers of the decoder")
    dropout: Share = Field(
        0.3, description="share dropped from the embeddings and the output of each block"
    )
    attention_dropout: Share = Field(0.0, description="share dropped from attention weights")
    activation_dropout: Share = Field(
        0.0, description="share dropped in feed-forward blocks, after the activation"
    )
    activation: Literal["relu", "gelu", "swiglu"] = Field(
        "relu", description="non-linearity of the feed-forward blocks"
    )
    norm: Literal["post", "pre"] = Field(
        "post", description="where layer norms stand: after each residual sum, or before each block"
    )
    positions: Literal["sinusoidal", "learned"] = Field(
        "sinusoidal", description="position encoding"
    )
    max_positions: Positive | None = Field(
        None, description="rows of the learned table, in tokens; required with positions: learned"
    )
    tie: Literal["all", "target", "none"] = Field(
        "all",
        description="which embeddings are one matrix",
    )
    scale_embedding: bool = Field(
        True, description="multiply embeddings by sqrt(d_model) before positions are added"
    )
    scale_attention: bool = Field(
        True, description="divide attention scores by the square root of a head's width"
    )
    word_dropout: Share = Field(
        0.0, description="share of subwords, on both sides, whose embedding is dropped in training"
    )
    layer_norm_eps: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        1e-5, description="added to the variance in layer norm"
    )

    def problems(self) -> Iterator[Problem]:
        if self.d_model % self.num_heads:
            yield Problem(
                ("d_model", "num_heads"),
                f"{self.d_model} is not divisible by num_heads ({self.num_heads})",
            )
        keys = ("max_positions", "positions")
        if self.positions == "learned" and self.max_positions is None:
            yield Problem(keys, "is required with positions: learned")
        if self.positions == "sinusoidal" and self.max_positions is not None:
            yield Problem(keys, "has no effect with positions: sinusoidal; remove it")


# Settings of the model that have no effect after training, and no weights.
OF_TRAINING = ("dropout", "attention_dropout", "activation_dropout", "word_dropout")


class OptimConfig(Section):
    """AdamW, its schedule, and the loss."""

    lr: Annotated[float, Field(gt=0.0)] = Field(
        5e-3, description="peak learning rate, reached at the end of the warm-up"
    )
    betas: Betas = Field((0.9, 0.98), description="decay rates of Adam's first and second moments")
    eps: Annotated[float, Field(gt=0.0)] = Field(1e-9, description="added to Adam's denominator")
    weight_decay: Annotated[float, Field(ge=0.0)] = Field(
        0.0, description="decoupled weight decay, as a factor of the learning rate"
    )
    schedule: Literal["inverse_sqrt", "cosine", "linear", "constant"] = Field(
        "inverse_sqrt", description="course of the learning rate after the warm-up"
    )
    warmup_steps: NotNegative = Field(
        1000, description="updates of linear rise to lr; 0 = full rate at once"
    )
    min_lr: Annotated[float, Field(ge=0.0)] = Field(
        0.0, description="learning rate that the schedule does not go below"
    )
    label_smoothing: Share = Field(
        0.1, description="probability mass spread evenly over the vocabulary"
    )
    rdrop: Annotated[float, Field(ge=0.0)] = Field(
        0.0,
        description="R-Drop: weight of the divergence between two passes with other dropout, which "
        "every batch then takes; 5 in the paper",
    )
    clip_norm: ClipNorm = Field(
        1.0, description="largest Euclidean norm of the gradient of one update; null = no clipping"
    )

    def problems(self) -> Iterator[Problem]:
        keys = ("min_lr", "schedule")
        if self.schedule == "constant" and self.min_lr > 0:
            yield Problem(keys, "has no effect with schedule: constant; remove it")
        elif self.min_lr > self.lr:
            yield Problem(("min_lr", "lr"), f"{self.min_lr} is above lr ({self.lr})")


class TrainConfig(Section):
    """Batches, length of training, validation, checkpoints."""

    init_from: Text | None = Field(
        None,
        description="run or checkpoint whose weights and vocabulary training begins with; its "
        "settings of the model hold; null = new weights",
    )
    batch_tokens: BatchTokens = Field(
        4096,
        description="largest padded size (rows x longest) of each side of a batch, in tokens; "
        "auto = found when the run begins, and kept",
    )
    batch_size: Positive | None = Field(
        None, description="sentence pairs per batch, instead of batch_tokens"
    )
    accumulate: Positive = Field(1, description="batches whose gradients are summed per update")
    max_steps: Positive | None = Field(None, description="stop after this many updates")
    max_epochs: Positive | None = Field(
        None, description="stop after this many passes over the training data"
    )
    max_time: Duration = Field(
        None, description="stop after this time in training: 90m, 1h30m, 45s, or whole seconds"
    )
    device: Device = Field(
        "auto", description="where training runs; auto = CUDA if there is one, else the CPU"
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto",
        description="arithmetic of matrix products; auto = bf16 on GPUs that have it, else fp32; "
        "bf16 on a CPU without instructions for it is trained as fp32",
    )
    tf32: bool = Field(
        False,
        description="round the factors of float32 products to TensorFloat-32 on GPUs that have it "
        "(NVIDIA, from Ampere on): faster, with 10 bits instead of 23",
    )
    compile: bool = Field(
        False,
        description="let torch.compile make the kernels of the layers; batches are padded to few "
        "sizes, so other dropout masks are drawn; needs a C++ compiler",
    )
    parallel: Literal["ddp", "fsdp"] = Field(
        "ddp",
        description="several processes: ddp = the whole model on each; fsdp = parameters, "
        "gradients and moments shared out among them, for models too large for one",
    )
    activation_checkpointing: bool = Field(
        False,
        description="keep only the input of each layer for backward and compute the rest again: "
        "less memory, for one forward pass more",
    )
    max_bad_updates: Positive = Field(
        10, description="stop after this many updates in a row whose gradient is not finite"
    )
    valid_every: Positive = Field(
        130, description="updates between validations; a checkpoint is written at each"
    )
    valid_beam: Positive = Field(1, description="beam width of validations during training")
    valid_samples: NotNegative = Field(
        3, description="translations written to log.jsonl at each validation"
    )
    log_every: Positive = Field(10, description="updates between two records in log.jsonl")
    best_metric: Literal["bleu", "chrf", "nll"] = Field(
        "bleu", description="validation figure that chooses the best checkpoint"
    )
    patience: Positive | None = Field(
        None, description="stop after this many validations without a better best; null = never"
    )
    keep_last: Positive = Field(10, description="newest checkpoints kept, besides the best ones")
    average: NotNegative = Field(
        10, description="checkpoints averaged at the end, 2 or more; 0 = no average"
    )
    average_of: Literal["last", "best", "both"] = Field(
        "last", description="which checkpoints are averaged: the last, the best, or each of the two"
    )
    ema: Annotated[float, Field(gt=0.0, lt=1.0)] | None = Field(
        None,
        description="decay per update of a running mean of the weights, which is scored at the end "
        "beside the other averages; such as 0.999; null = none",
    )
    tensorboard: bool = Field(
        False, description="write the records of log.jsonl for TensorBoard too"
    )

    @property
    def max_seconds(self) -> float | None:
        """`max_time` in seconds."""
        if isinstance(self.max_time, str):
            return seconds(self.max_time)
        return None if self.max_time is None else float(self.max_time)

    @property
    def padded_tokens(self) -> int | None:
        """`batch_tokens`; a run that says auto has found its number before it plans a batch."""
        assert not isinstance(self.batch_tokens, str), "auto was not resolved"
        return self.batch_tokens

    @model_validator(mode="before")
    @classmethod
    def _batch_size_replaces_tokens(cls, data: object) -> object:
        if isinstance(data, dict) and data.get("batch_size") and "batch_tokens" not in data:
            return {**data, "batch_tokens": None}
        return data

    def problems(self) -> Iterator[Problem]:
        sizes = ("batch_size", "batch_tokens")
        if self.batch_size is not None and self.batch_tokens is not None:
            yield Problem(sizes, "give either batch_size or batch_tokens and set the other to null")
        if self.batch_size is None and self.batch_tokens is None:
            yield Problem(sizes[::-1], "give either batch_tokens or batch_size")
        if self.batch_tokens == "auto" and self.parallel == "fsdp":
            # What is probed is the whole model on one process.
            yield Problem(
                ("batch_tokens", "parallel"),
                "auto cannot tell with parallel: fsdp; give a number (a run that has begun has it "
                "in its config.yaml)",
            )
        limits = ("max_steps", "max_epochs", "max_time")
        if self.max_steps is None and self.max_epochs is None and self.max_time is None:
            yield Problem(limits, "give at least one of max_steps, max_epochs and max_time")
        if self.average > self.keep_last:
            yield Problem(
                ("average", "keep_last"),
                f"{self.average} is above keep_last ({self.keep_last}); only kept checkpoints "
                "can be averaged",
            )
        if self.tf32 and self.precision in ("bf16", "fp16"):
            yield Problem(
                ("tf32", "precision"),
                f"has no effect with precision: {self.precision}, whose products are no float32",
            )
        if self.tf32 and self.device in ("cpu", "mps"):
            yield Problem(("tf32", "device"), f"has no effect with device: {self.device}")
        for name in ("compile", "parallel"):
            if self.device == "mps" and next(self.changed(name), None):
                value = str(getattr(self, name)).lower()
                yield Problem((name, "device"), f"{value} is not for device: mps")
        if self.ema is not None and self.ema < 0.5:
            yield Problem(
                ("ema",),
                f"{self.ema:g} keeps hardly anything; it is near 1, 1 - {self.ema:g} maybe",
            )
        if self.average == 1:
            yield Problem(("average",), "one checkpoint is no mean; give 2 or more, or 0")
        if self.average == 0 and self.average_of != "last":
            yield Problem(("average_of", "average"), "has no effect with average: 0")


class DecodeConfig(Section):
    """The search, where the command line does not say otherwise."""

    beam: Positive = Field(5, description="hypotheses kept per sentence; 1 = greedy")
    length_penalty: Annotated[float, Field(ge=-9.0, le=9.0)] = Field(
        1.0, description="A in: sum of log-probabilities / length^A; 0 = the plain sum"
    )
    max_length: Positive | None = Field(
        None, description="longest output in tokens, EOS included; null = 3 x source + 20"
    )


class RunConfig(Section):
    """All settings of a run."""

    run_dir: Text = Field(description="directory of the run's checkpoints, log and vocabulary")
    seed: Annotated[Whole, Field(ge=0, lt=2**63)] = Field(
        1, description="seed of the initial weights, the order of the data and dropout"
    )
    threads: Annotated[Positive, Field(le=1024)] | None = Field(
        None, description="CPU threads; null = one per core, or what the container may use"
    )
    data: DataConfig = Field(description="text files and filters")
    tokenizer: TokenizerConfig = Field(description="vocabulary")
    model: ModelConfig = Field(description="Transformer")
    optim: OptimConfig = Field(description="optimiser, schedule, loss")
    train: TrainConfig = Field(description="batches, validation, checkpoints")
    decode: DecodeConfig = Field(description="search")

    @model_validator(mode="before")
    @classmethod
    def _absent_sections_are_empty(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        return data | {name: {} for name in _SECTIONS if data.get(name) is None}

    def problems(self) -> Iterator[Problem]:
        train, optim, model = self.train, self.optim, self.model
        if optim.schedule in ("cosine", "linear"):
            keys = ("optim.schedule", "train.max_steps", "optim.warmup_steps")
            if train.max_steps is None:
                yield Problem(keys[:2], f"{optim.schedule} needs train.max_steps, where it ends")
            elif optim.warmup_steps >= train.max_steps:
                yield Problem(
                    keys[::-1],
                    f"{optim.warmup_steps} leaves no step of train.max_steps ({train.max_steps}) "
                    f"to the {optim.schedule} schedule; lower both, or raise train.max_steps",
                )
        if train.init_from is not None:
            for name in self.tokenizer.changed("level", "path", "source_path", "target_path"):
                yield Problem(
                    (f"tokenizer.{name}", "train.init_from"),
                    "has no effect with train.init_from, whose vocabulary is kept; remove it",
                )
        if optim.rdrop and not any(getattr(model, name) for name in OF_TRAINING):
            yield Problem(
                ("optim.rdrop", "model.dropout"), "has no effect without dropout in the model"
            )
        # What the file does not say of a model that exists is known only when that is read.
        known = train.init_from is None or "tie" in model.model_fields_set
        if model.tie == "all" and not self.tokenizer.shared and known:
            yield Problem(
                ("model.tie", "tokenizer.shared"),
                "all needs one vocabulary; use tie: target, or tokenizer.shared: true",
            )
        if model.positions != "learned" or model.max_positions is None:
            return
        for name, limit in (
            ("data.max_length", self.data.max_length if "data" in self.model_fields_set else None),
            ("decode.max_length", self.decode.max_length),
        ):
            if limit is not None and limit > model.max_positions:
                yield Problem(
                    (name, "model.max_positions"),
                    f"{limit} is above model.max_positions ({model.max_positions})",
                )


_SECTIONS = ("data", "tokenizer", "model", "optim", "train", "decode")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file, put `section.key=value` overrides on top, and check everything.

    Raises ConfigError with all problems, one per line: "file:line: section.key: message".
    """
    try:
        tree = read_yaml(path)
    except YamlProblem as problem:
        raise ConfigError(str(problem)) from None
    if tree.value is None:
        raise ConfigError(f"{path}: is empty; a configuration needs run_dir, data and train")
    if not isinstance(tree.value, dict):
        kind = "a list" if isinstance(tree.value, list) else "one word"
        raise ConfigError(f"{tree.spots[()].where}: holds {kind}, not key: value lines")
    for text in overrides:
        override(tree, text)
    return check(RunConfig, tree, OTHER_NAMES)


def parse_config(data: dict[str, Any], *, name: str = "config") -> RunConfig:
    """Check plain values, such as the settings inside a checkpoint's meta.json.

    Raises ConfigError with all problems, one per line: "name: section.key: message".
    """
    if not isinstance(data, dict):
        raise ConfigError(f"{name}: holds no section of key: value lines")
    return check(RunConfig, plain_tree(data, name), OTHER_NAMES)


def dump_config(config: RunConfig) -> str:
    """YAML text with every setting; `load_config` reads it back equal."""
    return dump_yaml(config.model_dump(mode="json"))


def with_batch_tokens(config: RunConfig, number: int) -> RunConfig:
    """The configuration with this `train.batch_tokens`."""
    train = config.train.model_copy(update={"batch_tokens": number})
    return config.model_copy(update={"train": train})


def changed_keys(old: RunConfig, new: RunConfig) -> dict[str, tuple[object, object]]:
    """Dotted key -> (old value, new value) of every setting that differs."""
    before, after = _flat(old.model_dump(mode="json")), _flat(new.model_dump(mode="json"))
    keys = [*before, *(key for key in after if key not in before)]
    return {
        key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)
    }


def _flat(value: Any, path: KeyPath = ()) -> dict[str, object]:
    if isinstance(value, dict):
        items: Any = value.items()
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        items = enumerate(value)
    else:
        return {dotted(path): value}
    return {key: leaf for name, item in items for key, leaf in _flat(item, (*path, name)).items()}
