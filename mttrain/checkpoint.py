"""Checkpoints: directories that translate alone, written aside and renamed, never unpickled.

    model.safetensors               parameters; a tied one once, under its first name
    meta.json                       model settings, languages, hashes, scores, versions
    tokenizer.json                  or tokenizer.source.json and tokenizer.target.json
    training.safetensors, .json     what resuming needs; only in the newest ones

A directory gets its final name by one rename, after all its files are on the disk: what has a final
name is complete. Whoever loads compares the SHA-256 of each file with meta.json first: a damaged
file is an error, not a strange model. meta.json holds the sum of its own content too; resuming
compares it, other readers do not, so that it can be corrected by hand. Tensors are safetensors and
the rest is JSON, so loading somebody's checkpoint runs no code of theirs. Price: a save writes the
parameters (with training state, about three times as much) and reads them once for the hashes.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from mttrain import __version__
from mttrain.config import ModelConfig
from mttrain.corpus import file_sha256, sync_directory
from mttrain.errors import CheckpointError, DataError, TokenizerError
from mttrain.model import Transformer
from mttrain.rundir import (
    LOWER_IS_BETTER,
    META,
    SHARED,
    SOURCE,
    STATE_TENSORS,
    STATE_VALUES,
    TARGET,
    WEIGHTS,
    Index,
    checkpoint_names,
    finite_json,
    is_name,
    prune,
    read_index,
    read_json,
    resolve_model,
    restore_replaced,
    typed_field,
    write_index,
    write_refusals,
)
from mttrain.tokenizer import Tokenizer

__all__ = [
    "LOWER_IS_BETTER",
    "Index",
    "ModelBundle",
    "TrainState",
    "average_checkpoints",
    "check_tokenizers",
    "checkpoint_names",
    "copy_weights",
    "load_model",
    "load_tokenizers",
    "load_train_state",
    "model_settings",
    "newest_good",
    "prune",
    "read_index",
    "read_meta",
    "resolve_model",
    "save_checkpoint",
    "verify",
    "write_index",
]

Tokenizers = tuple[Tokenizer, Tokenizer]
"""Source and target tokenizer; twice the same object when they are shared."""

_FORMAT = 1
_OWN_SUM = "content_sha256"  # checkpoints of older versions have none


@dataclass(slots=True)
class ModelBundle:
    """A model in evaluation mode, with its tokenizers and the content of its meta.json."""

    model: Transformer
    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer
    meta: dict[str, Any]
    path: Path


@dataclass(slots=True)
class TrainState:
    """What resuming needs besides the parameters: tensors by name, and plain JSON values."""

    tensors: dict[str, Tensor]
    values: dict[str, Any]


# ---- saving -----------------------------------------------------------------------------------


def save_checkpoint(
    run_dir: Path,
    step: int,
    model: Transformer,
    meta: Mapping[str, Any],
    tokenizers: Tokenizers,
    state: TrainState | None,
    *,
    name: str | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> Path:
    """Save a checkpoint as `checkpoints/step-<step>` (or `name`) and return its directory.

    `meta` gives what the caller knows (source_lang, target_lang, max_length, scores); the model's
    settings, hashes, versions and threads are added here. `weights` stands for the model's own
    parameters, for an average. A checkpoint of that name is replaced. CheckpointError when it
    cannot be written: then the earlier ones are untouched and nothing half-written stays.
    """
    name = name or f"step-{step:08d}"
    assert is_name(name), f"{name!r} is no checkpoint name"
    folder = run_dir / "checkpoints"
    aside = folder / f".tmp-{name}-{secrets.token_hex(4)}"
    try:
        with write_refusals(folder / name):
            folder.mkdir(parents=True, exist_ok=True)
            aside.mkdir()
            _save_tokenizers(aside, tokenizers)
            _save_tensors(aside / WEIGHTS, weights or dict(model.named_parameters()))
            if state is not None:
                _save_tensors(aside / STATE_TENSORS, state.tensors)
                (aside / STATE_VALUES).write_text(json.dumps(state.values), encoding="utf-8")
            content = {**_standard_meta(model, tokenizers, step), **meta}
            content["files"] = {path.name: file_sha256(path) for path in sorted(aside.iterdir())}
            content[_OWN_SUM] = _content_sum(content)
            (aside / META).write_text(finite_json(content), encoding="utf-8")
            for path in aside.iterdir():
                _sync_file(path)
            sync_directory(aside)
            _put_in_place(aside, folder / name)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder / name


def _standard_meta(model: Transformer, tokenizers: Tokenizers, step: int) -> dict[str, Any]:
    source, target = tokenizers
    return {
        "format": _FORMAT,
        "step": step,
        "model": {
            **model.config.model_dump(mode="json"),
            "source_vocab": model.encoder.embed_tokens.num_embeddings,
            "target_vocab": model.decoder.embed_tokens.num_embeddings,
        },
        "tokenizer_hash": {"source": source.hash, "target": target.hash},
        "versions": {
            "mttrain": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "threads": torch.get_num_threads(),
    }


def _save_tokenizers(folder: Path, tokenizers: Tokenizers) -> None:
    source, target = tokenizers
    if source.hash == target.hash:
        source.save(folder / SHARED)
    else:
        source.save(folder / SOURCE)
        target.save(folder / TARGET)


def _save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    try:
        save_file(plain, path)
    except SafetensorError as error:  # what it makes of a full disk
        raise OSError(str(error)) from None
    # save_file leaves the file readable by its owner alone, whatever the umask.
    path.chmod(path.parent.stat().st_mode & 0o666)


def _sync_file(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _put_in_place(aside: Path, final: Path) -> None:
    """Rename the written folder; one that has the name already steps aside until that is done."""
    replaced = final.with_name(f".old-{final.name}")
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    try:
        aside.rename(final)
    except BaseException:  # an interruption too
        restore_replaced(final.parent)
        raise
    sync_directory(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _content_sum(content: Mapping[str, Any]) -> str:
    """SHA-256 of the content of a meta.json as it is read back, without this sum itself."""
    plain = json.loads(finite_json({k: v for k, v in content.items() if k != _OWN_SUM}))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def newest_good(run_dir: Path, on_skipped: Callable[[str], None] | None = None) -> Path | None:
    """The newest checkpoint with training state whose files are whole; None if there is no state.

    `on_skipped` is told, in one sentence each, which newer ones are damaged. When all of them are,
    that is a CheckpointError: starting afresh must be somebody's decision.
    """
    folder = run_dir / "checkpoints"
    restore_replaced(folder)
    damaged = []
    for name in reversed(checkpoint_names(run_dir)):
        if not (folder / name / STATE_VALUES).exists():
            continue
        try:
            verify(folder / name)
        except CheckpointError as error:
            damaged.append(str(error))
            if on_skipped is not None:
                on_skipped(str(error))
        else:
            return folder / name
    if damaged:
        raise CheckpointError(
            f"{folder}: no checkpoint with training state is whole ({damaged[0]}) "
            "Restore one from a copy, or start again with --fresh."
        )
    return None


# ---- loading ---------------------------------------------------------------------------------


def load_model(path: str | Path, device: str | torch.device = "cpu") -> ModelBundle:
    """Load the model that `path` means (see `resolve_model`), in evaluation mode, on `device`.

    Names and shapes must be exactly those of the settings in meta.json, and the tokenizers exactly
    those it was trained with. Torch's random generators are left alone. CheckpointError otherwise.
    """
    folder = resolve_model(path)
    meta = read_meta(folder)
    _check_file(folder, meta, WEIGHTS)
    tokenizers = load_tokenizers(folder)
    check_tokenizers(meta, tokenizers, folder)
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"{folder / WEIGHTS}: cannot read it: {error}.") from None
    model = _build(folder, meta, tokenizers, tensors)
    copy_weights(model, tensors)
    return ModelBundle(model.to(device).eval(), *tokenizers, meta, folder)


def copy_weights(model: Transformer, weights: Mapping[str, Tensor]) -> None:
    """Give each parameter of the model the values that `weights` has under its name."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])


def load_train_state(path: str | Path) -> TrainState:
    """Load the training state of a checkpoint directory, on the CPU."""
    folder = Path(path)
    if not (folder / STATE_VALUES).exists():
        raise CheckpointError(f"{folder} holds no training state; it can translate, not resume.")
    meta = read_meta(folder)
    for name in (STATE_TENSORS, STATE_VALUES):
        _check_file(folder, meta, name)
    try:
        tensors = load_file(folder / STATE_TENSORS)
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"{folder / STATE_TENSORS}: cannot read it: {error}.") from None
    return TrainState(tensors, read_json(folder / STATE_VALUES))


def read_meta(folder: Path) -> dict[str, Any]:
    """The meta.json of a checkpoint directory, its own fields checked for type."""
    path = folder / META
    meta = read_json(path)
    if meta.get("format") != _FORMAT:
        found = str(meta.get("format"))[:20]
        raise CheckpointError(f"{path}: format {found}, but this version reads {_FORMAT}.")
    for name in ("model", "tokenizer_hash", "files"):
        typed_field(meta, name, dict, path)
    typed_field(meta, "step", int, path)
    return meta


def verify(folder: Path) -> None:
    """Raise CheckpointError unless every file of the checkpoint is as it was written."""
    meta = read_meta(folder)
    if _OWN_SUM in meta and meta[_OWN_SUM] != _content_sum(meta):
        raise CheckpointError(f"{folder / META} is damaged: its content does not fit its own sum.")
    # Tensors without values are what a kill left of a state that was being removed.
    state = (STATE_TENSORS, STATE_VALUES) if (folder / STATE_VALUES).exists() else ()
    for name in (WEIGHTS, *_tokenizer_files(folder), *state):
        _check_file(folder, meta, name)


def check_tokenizers(meta: Mapping[str, Any], tokenizers: Tokenizers, folder: Path) -> None:
    """Raise CheckpointError unless these are the very tokenizers of the model, side by side.

    Size does not tell: another order of the same number of entries gives fluent nonsense.
    """
    for side, tokenizer in zip(("source", "target"), tokenizers, strict=True):
        if meta["tokenizer_hash"].get(side) != tokenizer.hash:
            raise CheckpointError(
                f"{folder}: the {side} tokenizer is not the one this model was trained with. "
                "Put the original tokenizer files back, or train a new model."
            )


def average_checkpoints(paths: Sequence[Path]) -> dict[str, Tensor]:
    """The arithmetic mean of the parameters of several checkpoints, on the CPU.

    Summed in float64 and rounded once, tensor by tensor: memory for two of the models. They must
    have the same parameters and the same tokenizers; CheckpointError names the one that differs.
    """
    assert paths, "nothing to average"
    metas = [read_meta(path) for path in paths]
    for path, meta in zip(paths, metas, strict=True):
        _check_file(path, meta, WEIGHTS)
        if meta["tokenizer_hash"] != metas[0]["tokenizer_hash"]:
            raise CheckpointError(f"{path} and {paths[0]} have other tokenizers: no average.")
    mean: dict[str, Tensor] = {}
    for number, path in enumerate(paths):
        with _open_weights(path) as weights:
            names = set(weights.keys())
            if number and names != mean.keys():
                raise CheckpointError(f"{path} and {paths[0]} have other parameters: no average.")
            for name in names:
                value = weights.get_tensor(name)
                if number and value.shape != mean[name].shape:
                    raise CheckpointError(f"{path} and {paths[0]} differ in the shape of {name}.")
                mean[name] = mean[name] + value.double() if number else value.double()
    return {name: (total / len(paths)).float() for name, total in sorted(mean.items())}


@contextmanager
def _open_weights(folder: Path) -> Iterator[Any]:
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as weights:
            yield weights
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder / WEIGHTS}: cannot read it: {error}.") from None


def _build(
    folder: Path, meta: Mapping[str, Any], tokenizers: Tokenizers, tensors: Mapping[str, Tensor]
) -> Transformer:
    """A new model of the settings in `meta`; its parameters are those of `tensors` by shape."""
    vocab = [meta["model"].get(f"{side}_vocab") for side in ("source", "target")]
    if vocab != [tokenizer.size for tokenizer in tokenizers]:
        raise CheckpointError(f"{folder}: the tokenizers do not have the size of the vocabularies.")
    config = model_settings(folder, meta)
    if config.encoder_layers + config.decoder_layers > len(tensors):
        raise CheckpointError(f"{folder / WEIGHTS} holds fewer layers than {META} says.")
    # Shapes first, on the device that holds no data: settings that do not fit cost no memory.
    try:
        with torch.device("meta"):
            wanted = dict(_new_model(folder, config, *vocab).named_parameters())
    except (RuntimeError, TypeError, ValueError, OverflowError):  # sizes beyond 64 bits
        raise CheckpointError(f"{folder / META}: no model can have these settings.") from None
    for name in sorted(wanted.keys() | tensors.keys()):
        _check_tensor(folder, name, wanted.get(name), tensors.get(name))
    with torch.random.fork_rng(devices=[]):
        return _new_model(folder, config, *vocab)


def model_settings(folder: Path, meta: Mapping[str, Any]) -> ModelConfig:
    """The settings of the model in a meta.json; CheckpointError when they are none."""
    vocab = ("source_vocab", "target_vocab")
    settings = {name: value for name, value in meta["model"].items() if name not in vocab}
    try:
        return ModelConfig.model_validate(settings)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        text = f"model.{where[:80]}: {first['msg']}"
        raise CheckpointError(f"{folder / META}: {' '.join(text.split())}.") from None


def _new_model(folder: Path, config: ModelConfig, source: int, target: int) -> Transformer:
    if config.tie == "all" and source != target:
        raise CheckpointError(f"{folder / META}: tie: all needs one vocabulary for both sides.")
    return Transformer(config, source, target)


def _check_tensor(folder: Path, name: str, wanted: Tensor | None, found: Tensor | None) -> None:
    if wanted is None:
        problem = "is no parameter of this model"
    elif found is None:
        problem = "is missing"
    elif wanted.shape != found.shape:
        problem = f"has shape {list(found.shape)}, but the model needs {list(wanted.shape)}"
    elif not found.is_floating_point():
        problem = f"holds {found.dtype}, not floating-point numbers"
    else:
        return
    raise CheckpointError(f"{folder / WEIGHTS}: {name[:80]!r} {problem}.")


def _tokenizer_files(folder: Path) -> tuple[str, ...]:
    return (SHARED,) if (folder / SHARED).exists() else (SOURCE, TARGET)


def load_tokenizers(folder: Path) -> Tokenizers:
    """The tokenizers of a checkpoint directory, as its files are."""
    try:
        loaded = [Tokenizer.load(folder / name) for name in _tokenizer_files(folder)]
    except TokenizerError as error:
        raise CheckpointError(str(error)) from None
    return loaded[0], loaded[-1]


def _check_file(folder: Path, meta: Mapping[str, Any], name: str) -> None:
    path = folder / name
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: the checkpoint is incomplete.")
    try:
        found = file_sha256(path)
    except DataError as error:
        raise CheckpointError(str(error)) from None
    if found != meta["files"].get(name):
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not the one in {META}.")
