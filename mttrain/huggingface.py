"""A model as a directory that Hugging Face's transformers loads, without code of ours.

The parameters already have the names of the BART family, whose members differ in the order of the
layer norms and in the positions: MarianMTModel is post-norm with sinusoidal positions, Pegasus
pre-norm with the same positions, Blenderbot pre-norm with learned ones. Marian and Pegasus compute
their position table with all sines left of all cosines, where ours alternate; so every weight that
touches the residual stream gets its columns in that order, and the function stays the same. What
no such architecture can compute is refused by name.

The directory is loaded again and compared with the model before it gets its name: the ids of the
text, the logits, and the text of greedy search. Price: the import of transformers (seconds), one
more copy of the model in memory, and two greedy searches over the lines.

Shapes: B sentences, S source length, T target length, D d_model, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from mttrain.attention import Attention
from mttrain.config import ModelConfig
from mttrain.errors import ConfigError, MissingDependency
from mttrain.exporting import ExportReport, new_directory, write_report
from mttrain.hfcheck import TARGET_FOLDER, compare
from mttrain.model import Transformer
from mttrain.modelcard import model_card
from mttrain.tokenizer import BOS_ID, EOS_ID, PAD_ID, SPECIAL, Tokenizer
from mttrain.translator import TranslateOptions, Translator, saved_decoding

FORMAT = "huggingface"

# (norm, positions) -> configuration and model class of transformers.
_CLASSES = {
    ("post", "sinusoidal"): ("MarianConfig", "MarianMTModel"),
    ("pre", "sinusoidal"): ("PegasusConfig", "PegasusForConditionalGeneration"),
    ("pre", "learned"): ("BlenderbotConfig", "BlenderbotForConditionalGeneration"),
}
_EPS = 1e-5  # what all of them use in layer norm; it cannot be set
_ACTIVATIONS = ("relu", "gelu")
# Rows of a sinusoidal position table, at least; beyond its end transformers raises IndexError.
_FEWEST_POSITIONS = 1024
_IMPOSSIBLE = -1e9  # logit of an id that the target vocabulary does not have
# Computed by the model itself, or zero: all that may be absent from what we give it.
_OWN = ("embed_positions.weight", "final_logits_bias")

# What a parameter does with the residual stream: reads it (its columns), or writes it (its rows).
_READS = ("embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "fc1")
_WRITES = ("out_proj", "fc2", "layer_norm")


@dataclass(frozen=True)
class _Limits:
    """Lengths in tokens, EOS included."""

    source: int  # the tokenizer cuts a longer one
    output: int  # generate ends there
    positions: int  # rows of the position table


def export_huggingface(
    model: str, output: Path, *, lines: Sequence[str], replace: bool
) -> ExportReport:
    """Write the model (run or checkpoint directory) to `output` and compare it on `lines`.

    MissingDependency without transformers; ConfigError for settings that no architecture there
    has, and for a directory that may not be replaced; CheckpointError when the written directory
    does not translate as the model does: then there is none.
    """
    library = _transformers()
    translator = Translator.load(model, device="cpu", precision="fp32")
    bundle = translator.bundles[0]
    settings = bundle.model.config
    _refuse(settings)
    saved = saved_decoding(bundle.meta, bundle.path)
    options = translator.completed(TranslateOptions(**saved, tag=translator.needed_tag))
    limits = _limits(settings, options, bundle.meta.get("max_length"))
    with new_directory(output, replace=replace) as folder, _quiet(library):
        theirs = _converted(library, bundle.model, limits)
        theirs.generation_config = library.GenerationConfig(**_generation(options, limits))
        try:
            theirs.save_pretrained(folder)
        except SafetensorError as error:  # what it makes of a full disk
            raise OSError(str(error)) from None
        separate = bundle.source_tokenizer.hash != bundle.target_tokenizer.hash
        _save_tokenizer(folder, bundle.source_tokenizer, limits.source)
        if separate:
            _save_tokenizer(folder / TARGET_FOLDER, bundle.target_tokenizer, limits.output)
        name = type(theirs).__name__
        remarks = list(_remarks(settings, separate))
        card = model_card(
            bundle, output.resolve().name, name, remarks, separate=separate, longest=limits.source
        )
        (folder / "README.md").write_text(card, encoding="utf-8")
        del theirs
        result = compare(library, folder, translator, lines, limits.output, separate)
        about = f"It is a {name}; README.md is its model card: fill in the licence there."
        notes = (*result.notes, about, *remarks)
        report = ExportReport(
            str(output), FORMAT, len(lines), result.equal, result.largest_difference, notes
        )
        write_report(folder, report)
    return report


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise MissingDependency(
            "Exporting for Hugging Face needs transformers: pip install 'mttrain[export]'"
        ) from None
    return transformers


@contextmanager
def _quiet(library: Any) -> Iterator[None]:
    """No progress bars and hints of the library: what matters is in the report."""
    logging = library.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


# ---- settings ---------------------------------------------------------------------------------


def _refuse(settings: ModelConfig) -> None:
    """Raise ConfigError with everything that no architecture of transformers can compute."""
    problems = []
    if settings.activation not in _ACTIVATIONS:
        problems.append(
            f"model.activation is {settings.activation}, but only {' and '.join(_ACTIVATIONS)} can "
            "be exported"
        )
    if settings.layer_norm_eps != _EPS:
        problems.append(
            f"model.layer_norm_eps is {settings.layer_norm_eps:g}, but only {_EPS:g} can be "
            "exported"
        )
    if (settings.norm, settings.positions) not in _CLASSES:
        problems.append(
            f"model.positions is {settings.positions} with model.norm {settings.norm}, but only "
            "sinusoidal positions, or learned ones with norm: pre, can be exported"
        )
    if problems:
        raise ConfigError(
            "No architecture of transformers computes this model: " + "; ".join(problems) + "."
        )


def _limits(settings: ModelConfig, options: TranslateOptions, trained: object) -> _Limits:
    """Where inputs are cut and outputs end.

    transformers has no limit that depends on the source: 3 x the longest training side + 20 stands
    for our 3 x source + 20.
    """
    source = options.max_source_length
    assert source is not None, "the options are not completed"
    longest = trained if isinstance(trained, int) else source
    output = options.max_length or 3 * longest + 20
    if settings.max_positions is not None and settings.positions == "learned":
        return _Limits(source, min(output, settings.max_positions), settings.max_positions)
    return _Limits(source, output, max(_FEWEST_POSITIONS, source, output))


def _generation(options: TranslateOptions, limits: _Limits) -> dict[str, Any]:
    """Our search in the words of transformers.

    There too a hypothesis ranks by its sum / length^A, EOS counted and BOS not, forbidden ids are
    masked without renormalising, and with early_stopping a sentence is done when as many
    hypotheses as beams have ended.
    """
    beams: dict[str, Any] = {}
    if options.beam > 1:  # greedy search has neither, and transformers says so
        beams = {"length_penalty": options.length_penalty, "early_stopping": True}
    return {
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "decoder_start_token_id": BOS_ID,
        "num_beams": options.beam,
        **beams,
        "max_length": limits.output + 1,  # BOS counts there
        "suppress_tokens": list(options.forbidden),
    }


def _remarks(settings: ModelConfig, separate: bool) -> Iterator[str]:
    """What whoever loads the directory must know."""
    if settings.norm == "pre" and settings.tie != "all":
        yield (
            "It needs transformers 5 or newer: older versions take its embeddings for one matrix "
            "and translate wrongly."
        )
    if separate:
        yield f"The tokenizer of the target is in the subfolder {TARGET_FOLDER}."


# ---- parameters -------------------------------------------------------------------------------


def _converted(library: Any, model: Transformer, limits: _Limits) -> Any:
    """The model as one of transformers; all its tensors have a place there, and the reverse."""
    settings = model.config
    names = _CLASSES[settings.norm, settings.positions]
    source, target = (stack.embed_tokens.num_embeddings for stack in (model.encoder, model.decoder))
    kind, build = (getattr(library, name) for name in names)
    marian = names[0] == "MarianConfig"
    values: dict[str, Any] = {"vocab_size": source if marian else max(source, target)}
    if marian:
        values["decoder_vocab_size"] = target
        values["share_encoder_decoder_embeddings"] = settings.tie == "all"
        values["tie_word_embeddings"] = settings.tie != "none"
    else:  # there the source embedding is tied with the others, or nothing is
        values["tie_word_embeddings"] = settings.tie == "all"
    if names[0] == "BlenderbotConfig":
        values["encoder_no_repeat_ngram_size"] = 0
    with torch.random.fork_rng(devices=[]):  # all that it draws is replaced
        theirs = build(kind(**values, **_sizes(settings, limits))).eval()
    tensors = _tensors(model, theirs.state_dict(), None if marian else max(source, target))
    missing, unexpected = theirs.load_state_dict(tensors, strict=False)
    absent = [name for name in missing if not name.endswith(_OWN)]
    assert not absent and not unexpected, f"no place for {unexpected}, nothing for {absent}"
    return theirs


def _sizes(settings: ModelConfig, limits: _Limits) -> dict[str, Any]:
    return {
        "d_model": settings.d_model,
        "encoder_layers": settings.encoder_layers,
        "decoder_layers": settings.decoder_layers,
        "encoder_attention_heads": settings.num_heads,
        "decoder_attention_heads": settings.num_heads,
        "encoder_ffn_dim": settings.d_ff,
        "decoder_ffn_dim": settings.d_ff,
        "activation_function": settings.activation,
        "dropout": settings.dropout,
        "attention_dropout": settings.attention_dropout,
        "activation_dropout": settings.activation_dropout,
        "scale_embedding": settings.scale_embedding,
        "max_position_embeddings": limits.positions,
        "pad_token_id": PAD_ID,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "decoder_start_token_id": BOS_ID,
        "forced_eos_token_id": None,
    }


def _tensors(model: Transformer, wanted: dict[str, Tensor], rows: int | None) -> dict[str, Tensor]:
    """Our parameters under their names, their residual columns in their order.

    rows: to which vocabularies of two sizes are filled up, for a class that has one size; an id
    that is only there to fill never gets probability.
    """
    order = residual_order(model.config)
    factors = {
        f"{name}.q_proj": module.query_factor()
        for name, module in model.named_modules()
        if isinstance(module, Attention)
    }
    tensors = {}
    for name, value in model.state_dict().items():
        value = value * factors.get(name.rpartition(".")[0], 1.0)
        value = _reordered(name, value, order)
        if rows is not None and name.split(".")[-2] in ("embed_tokens", "lm_head"):
            value = torch.cat([value, value.new_zeros(rows - len(value), value.shape[1])])
        tensors[name if name.startswith("lm_head") else f"model.{name}"] = value
    if "model.shared.weight" in wanted:
        tensors["model.shared.weight"] = tensors["model.encoder.embed_tokens.weight"]
    if rows is not None and rows > model.lm_head.out_features:
        bias = torch.zeros(1, rows)
        bias[:, model.lm_head.out_features :] = _IMPOSSIBLE
        tensors["final_logits_bias"] = bias
    return tensors


def residual_order(settings: ModelConfig) -> Tensor:
    """Which of our columns [D] stands at each of theirs: 0, 2, 4, ..., then 1, 3, 5, ...

    Learned positions are parameters like any other, and stay where they are.
    """
    columns = torch.arange(settings.d_model)
    if settings.positions == "learned":
        return columns
    return torch.cat([columns[0::2], columns[1::2]])


def _reordered(name: str, value: Tensor, order: Tensor) -> Tensor:
    """A parameter after the residual columns have changed places."""
    module, kind = name.split(".")[-2:]
    if module.endswith(_WRITES):
        return value[order]
    if module == "embed_positions":
        return value[:, order]
    assert module in _READS, f"{name} has no known place in the residual stream"
    return value[:, order] if kind == "weight" else value


# ---- tokenizer --------------------------------------------------------------------------------


def _save_tokenizer(folder: Path, tokenizer: Tokenizer, longest: int) -> None:
    """The files of a tokenizer that appends EOS and takes no text for a control symbol.

    transformers makes named special tokens "added tokens", which it looks for in the text;
    split_special_tokens stops that, so a literal "</s>" stays text.
    """
    folder.mkdir(exist_ok=True)
    path = folder / "tokenizer.json"
    tokenizer.save(path)
    content = json.loads(path.read_text(encoding="utf-8"))
    eos = SPECIAL[EOS_ID]
    sequences: list[dict[str, Any]] = []
    for name in "AB":
        sequences.append({"Sequence": {"id": name, "type_id": 0}})
        sequences.append({"SpecialToken": {"id": eos, "type_id": 0}})
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": sequences[:2],
        "pair": sequences,
        "special_tokens": {eos: {"id": eos, "ids": [EOS_ID], "tokens": [eos]}},
    }
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    names = zip(("pad_token", "unk_token", "bos_token", "eos_token"), SPECIAL, strict=True)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **dict(names),
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": longest,
        "padding_side": "right",
        "truncation_side": "right",
    }
    text = json.dumps(settings, indent=1, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
