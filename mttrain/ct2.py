"""A model as a directory for CTranslate2, and the proof that it translates alike.

The weights go into the library's own specification, by its Python interface: q, k and v joined as
it wants them, everything else under another name. Positions are written out as a table, because
the library's own sinusoids have another order of columns and begin at 1; the table ends somewhere
and says so. All that `ModelConfig` allows can be written. Source lines must end with "</s>", which
is left to the caller, as for any CTranslate2 model that does not say otherwise.

Before the directory gets its name it is loaded again and compared with the model: the scores of
pairs of random ids (which see every kind of layer, whatever the text is), the scores of the
model's own greedy translations, and the ids of the greedy translations. Where these differ, the
two tokens at the fork must be equally likely to the last digits. Rounded weights cannot be held to
that: for them the outputs must be alike by chrF, and the report says how much.

Price: the weights once more in memory, one greedy search of the lines by each, one forced pass.

Shapes: D d_model, P positions.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mttrain import __version__
from mttrain.checkpoint import ModelBundle
from mttrain.corpus import file_sha256
from mttrain.ct2_engine import load_exported
from mttrain.ct2_files import FORMAT, is_exported, require_ctranslate2, stored_tokens
from mttrain.errors import CheckpointError, ConfigError
from mttrain.exporting import ExportReport, new_directory, write_report
from mttrain.metrics import bleu_tokenizer, score_corpus
from mttrain.model import Stack, Transformer, sinusoidal_positions
from mttrain.rundir import META, SHARED, SOURCE, TARGET, WEIGHTS, finite_json
from mttrain.segments import cut_ids
from mttrain.tags import tag_lang
from mttrain.tokenizer import BOS_ID, EOS_ID, SPECIAL, UNK_ID
from mttrain.translator import DEFAULT_MAX_SOURCE, TranslateOptions, Translator

TOLERANCE = 1e-4  # largest difference of a log-probability per token
ROUNDED = 1.0  # the same on random ids with rounded weights; up to 0.2 was seen with int8
LEAST_CHRF = 60.0  # of the outputs of rounded weights against those of the model
_EXACT = (None, "float32")
_FEWEST_POSITIONS = 4096  # rows of a sinusoidal table
_PROBES = 8  # pairs of random ids
_PROBE_LENGTH = 40
_LARGEST_MATRIX = 1 << 32  # bytes; the file holds the size in 32 bits
_ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "swiglu": "SWISH"}
_SHOWN = 120  # characters of a text in a message


def export_ctranslate2(
    model: str | Path | Translator,
    output: Path,
    *,
    lines: Sequence[str],
    quantization: str | None = None,
    replace: bool = False,
) -> ExportReport:
    """Write a run's or checkpoint's model to `output` and compare it on `lines` of source text.

    quantization: the library's name of a type of weights, such as int8; None is float32. A
    translator in place of a path must hold one model, on the CPU in fp32. ConfigError for an
    unknown type and for a directory that may not be replaced; MissingDependency without the
    library; CheckpointError when the two translate unlike each other: then nothing is written.
    """
    library = require_ctranslate2()
    check_quantization(library, quantization)
    if isinstance(model, Translator):
        native = model
    elif is_exported(model):
        raise CheckpointError(f"{model} is an export; give the run or checkpoint it was made of.")
    else:
        native = Translator.load(model, device="cpu", precision="fp32")
    (bundle,) = native.bundles
    with new_directory(output, replace=replace) as folder:
        write_ctranslate2(library, bundle, folder, quantization)
        exported = load_exported(folder, device="cpu", compute_type=_check_type(quantization))
        probe(native, exported, exact=quantization in _EXACT)
        found = compare(native, exported, lines, exact=quantization in _EXACT)
        report = ExportReport(
            str(output),
            f"{FORMAT} {quantization or 'float32'}",
            len(lines),
            found.equal,
            None,
            (*found.notes, *_type_notes(exported, quantization)),
        )
        write_report(folder, report)
    return report


def check_quantization(library: Any, name: str | None) -> None:
    """ConfigError for a type of weights that the library does not know."""
    known = library.specs.model_spec.ACCEPTED_MODEL_TYPES
    if name is not None and name not in known:
        raise ConfigError(f"--quantization {name} is unknown; use one of {', '.join(known)}.")


def _check_type(quantization: str | None) -> str:
    return "float32" if quantization in _EXACT else "default"


def _type_notes(exported: Translator, quantization: str | None) -> list[str]:
    if quantization in _EXACT:
        return []
    used = getattr(exported.engine, "compute_type", "")
    return [f"The weights are {quantization}; they were compared on this CPU as {used}."]


# ---- writing ----------------------------------------------------------------------------------


def write_ctranslate2(
    library: Any, bundle: ModelBundle, folder: Path, quantization: str | None
) -> None:
    """Fill an empty directory with the model, its vocabularies, its tokenizers and meta.json."""
    source, target = bundle.source_tokenizer, bundle.target_tokenizer
    names = [SHARED] if source.hash == target.hash else [SOURCE, TARGET]
    for name, tokenizer in zip(names, (source, target), strict=False):
        tokenizer.save(folder / name)
    tokens = [stored_tokens(folder / name) for name in names]
    spec = _specification(library, bundle.model, table_rows(bundle))
    spec.register_source_vocabulary(tokens[0])
    spec.register_target_vocabulary(tokens[-1])
    spec.config.layer_norm_epsilon = bundle.model.config.layer_norm_eps
    spec.config.unk_token = SPECIAL[UNK_ID]
    spec.config.bos_token = spec.config.decoder_start_token = SPECIAL[BOS_ID]
    spec.config.eos_token = SPECIAL[EOS_ID]
    spec.validate()
    spec.optimize(quantization)
    spec.save(str(folder))
    learned = bundle.model.max_positions
    content = {name: value for name, value in bundle.meta.items() if name != "content_sha256"}
    content["export"] = {
        "to": FORMAT,
        "quantization": quantization or "float32",
        # One row more is written: a forced pass over an output at the limit needs it.
        "positions": table_rows(bundle) - 1,
        "learned_positions": learned is not None,
        "checkpoint_weights": bundle.meta.get("files", {}).get(WEIGHTS),
        "versions": {"mttrain": __version__, "ctranslate2": library.__version__},
    }
    # Not what others put there, such as the report.
    written = [p for p in sorted(folder.iterdir()) if p.suffix in (".bin", ".json")]
    ours = {p.name: file_sha256(p) for p in written if not p.name.startswith("mttrain-")}
    content["files"] = ours
    (folder / META).write_text(finite_json(content), encoding="utf-8")


def table_rows(bundle: ModelBundle) -> int:
    """Rows of the written position table: what decoding may need, and one more for scoring.

    Learned positions are as many as there are. Sinusoidal ones reach as far as the default limits
    of source and output.
    """
    learned = bundle.model.max_positions
    if learned is not None:
        return learned + 1
    trained = bundle.meta.get("max_length")
    source = max(DEFAULT_MAX_SOURCE, trained if isinstance(trained, int) else 0)
    return max(_FEWEST_POSITIONS, 3 * source + 20) + 1


def _specification(library: Any, model: Transformer, rows: int) -> Any:
    """The library's specification with the weights of the model; rows: of the position table."""
    config = model.config
    specs = library.specs
    spec = specs.TransformerSpec.from_config(
        (config.encoder_layers, config.decoder_layers),
        config.num_heads,
        pre_norm=config.norm == "pre",
        activation=getattr(specs.common_spec.Activation, _ACTIVATIONS[config.activation]),
        ffn_glu=config.activation == "swiglu",
    )
    _fill_stack(spec.encoder, spec.encoder.embeddings[0], model.encoder, rows)
    _fill_stack(spec.decoder, spec.decoder.embeddings, model.decoder, rows)
    spec.decoder.projection.weight = _copy(model.lm_head.weight)
    return spec


def _fill_stack(spec: Any, embeddings: Any, stack: Stack, rows: int) -> None:
    """Encoder or decoder: embeddings, which are scaled by sqrt(D) there too, positions, layers."""
    spec.scale_embeddings = stack.scale != 1.0
    embeddings.weight = _copy(stack.embed_tokens.weight)
    spec.position_encodings.encodings = _positions(stack, rows)
    if hasattr(stack, "layer_norm"):
        _fill_norm(spec.layer_norm, stack.layer_norm)
    layers: list[Any] = list(stack.layers)
    for part, layer in zip(spec.layer, layers, strict=True):
        own = layer.self_attn
        first = own.query_factor()
        _fill_linear(part.self_attention.linear[0], own.q_proj, own.k_proj, own.v_proj, first=first)
        _fill_linear(part.self_attention.linear[1], own.out_proj)
        _fill_norm(part.self_attention.layer_norm, layer.self_attn_layer_norm)
        if hasattr(layer, "encoder_attn"):
            cross = layer.encoder_attn
            _fill_linear(part.attention.linear[0], cross.q_proj, first=cross.query_factor())
            _fill_linear(part.attention.linear[1], cross.k_proj, cross.v_proj)
            _fill_linear(part.attention.linear[2], cross.out_proj)
            _fill_norm(part.attention.layer_norm, layer.encoder_attn_layer_norm)
        _fill_linear(part.ffn.linear_0, layer.fc1)
        _fill_linear(part.ffn.linear_1, layer.fc2)
        if hasattr(layer, "fc3"):  # swiglu: fc1 goes through the activation, fc3 does not
            _fill_linear(part.ffn.linear_0_noact, layer.fc3)
        _fill_norm(part.ffn.layer_norm, layer.final_layer_norm)


def _positions(stack: Stack, rows: int) -> Tensor:
    """The position table [P, D]: the paper's, or the learned rows and one of zeros."""
    if not hasattr(stack, "embed_positions"):
        return sinusoidal_positions(0, rows, stack.d_model)
    learned = _copy(stack.embed_positions.weight)
    return torch.cat([learned, learned.new_zeros(rows - len(learned), stack.d_model)])


def _fill_linear(spec: Any, *parts: Any, first: float = 1.0) -> None:
    """Several projections of one input, one below the other; first: factor of the first."""
    factors = [first, *(1.0,) * (len(parts) - 1)]
    pairs = list(zip(parts, factors, strict=True))
    spec.weight = torch.cat([_copy(part.weight) * factor for part, factor in pairs])
    spec.bias = torch.cat([_copy(part.bias) * factor for part, factor in pairs])


def _fill_norm(spec: Any, norm: Any) -> None:
    spec.gamma, spec.beta = _copy(norm.weight), _copy(norm.bias)


def _copy(weight: Tensor) -> Tensor:
    """A copy, since the library rounds in place."""
    if weight.numel() * 4 >= _LARGEST_MATRIX:
        raise ConfigError(
            f"A matrix of {list(weight.shape)} has 4 GiB or more, which CTranslate2's file cannot "
            "hold; the model cannot be exported."
        )
    return weight.detach().to("cpu", torch.float32, copy=True)


# ---- comparing --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """How two translators compared: lines with the same output, and what is to be said of it."""

    equal: int
    notes: tuple[str, ...]


def probe(native: Translator, exported: Translator, *, exact: bool) -> None:
    """Compare the scores of random pairs of ids; CheckpointError when the weights differ.

    That sees every kind of weight, without a text. What is wrong is wrong by far, so rounded
    weights (not exact) can be told from wrong ones too.
    """
    draw = random.Random(1)
    longest = min(_PROBE_LENGTH, (native.max_positions or _PROBE_LENGTH) - 1)
    sizes = [native.source_tokenizer.size, native.target_tokenizer.size]
    items = []
    for _ in range(_PROBES):
        source, target = (
            [draw.randrange(len(SPECIAL), size) for _ in range(draw.randint(1, max(1, longest)))]
            for size in sizes
        )
        items.append(([*source, EOS_ID], [*target, EOS_ID]))
    scores = zip(items, native.score_ids(items), exported.score_ids(items), strict=True)
    for (_, target), one, other in scores:
        if not abs(one - other) <= (TOLERANCE if exact else ROUNDED) * len(target):
            raise _unlike(f"random ids score {other:.4f} there, but {one:.4f} here")


def compare(
    native: Translator, exported: Translator, lines: Sequence[str], *, exact: bool
) -> Comparison:
    """Compare the greedy translations of the lines.

    exact: the outputs must be equal but for ties, and so must be the scores; otherwise alike.
    CheckpointError, which names the first line and both texts, when they are not.
    """
    options = TranslateOptions(beam=1, tag=native.needed_tag)
    ours = [found.hypotheses[0] for found in native.translate_lines(lines, options)]
    theirs = [found.hypotheses[0] for found in exported.translate_lines(lines, options)]
    texts = [h.text for h in ours], [h.text for h in theirs]
    ends = [
        [[*h.tokens, EOS_ID] if h.finished else list(h.tokens) for h in found]
        for found in (ours, theirs)
    ]
    other = [i for i in range(len(lines)) if ends[0][i] != ends[1][i]]
    equal = len(lines) - len(other)
    if not exact:
        lang = tag_lang(options.tag, native.members[0].meta)
        return Comparison(equal, _alike(*texts, lang))
    limit = native.completed(options).max_source_length
    encoded = native.encode_sources(lines, options.tag)
    sources = [cut_ids(ids, limit)[0] for ids in encoded]
    forks = [_fork(native, sources[i], ends[0][i], ends[1][i]) for i in other]
    for i, apart in zip(other, forks, strict=True):
        if not apart <= TOLERANCE:
            raise _unlike(
                f"line {i + 1} of those compared, {_short(lines[i])}, is {_short(texts[0][i])} "
                f"here and {_short(texts[1][i])} there"
            )
    items = [(source, end) for source, end in zip(sources, ends[0], strict=True)]
    pairs = zip(items, native.score_ids(items), exported.score_ids(items), strict=True)
    largest = 0.0
    for number, ((_, end), mine, its) in enumerate(pairs, 1):
        if not abs(mine - its) <= TOLERANCE * len(end):
            raise _unlike(f"line {number} of those compared scores {its:.4f}, not {mine:.4f}")
        largest = max(largest, abs(mine - its))
    notes = [f"Scores of the translations differ by at most {largest:.1e}."]
    if other:
        notes.append(f"{len(other)} lines differ where two tokens are equally likely.")
    return Comparison(equal, tuple(notes))


def _fork(native: Translator, source: list[int], one: list[int], other: list[int]) -> float:
    """How much likelier our token is than the other where two outputs part, as a logarithm."""
    pairs = enumerate(zip(one, other, strict=False))
    at = next((at for at, (mine, its) in pairs if mine != its), None)
    if at is None:  # one is the beginning of the other
        return float("inf")
    scores = native.score_ids([(source, one[: at + 1]), (source, other[: at + 1])])
    return abs(scores[0] - scores[1])


def _alike(ours: list[str], theirs: list[str], lang: str | None) -> tuple[str, ...]:
    """What is to be said of outputs that need not be equal; CheckpointError if they are unlike."""
    spaced = bleu_tokenizer(lang) == "13a"
    scores = score_corpus(
        theirs, [ours], tokenize="13a" if spaced else "char", metrics=("bleu", "chrf")
    )
    bleu, chrf = (score.value for score in scores)
    figures = f"BLEU {bleu:.1f} and chrF {chrf:.1f} against the model's own translations"
    if ours != theirs and not chrf >= LEAST_CHRF:
        at = next(i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1])
        raise _unlike(
            f"the translations have {figures}, less than chrF {LEAST_CHRF:g}; line {at + 1} is "
            f"{_short(ours[at])} here and {_short(theirs[at])} there"
        )
    return (f"With rounded weights the translations have {figures}.",)


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")


def _unlike(problem: str) -> CheckpointError:
    return CheckpointError(
        f"The export was not written: CTranslate2 does not compute what the model does: {problem}."
    )
