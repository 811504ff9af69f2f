"""Training that begins with the weights and the vocabulary of an earlier model (`train.init_from`).

The optimiser is fresh and the corpora are those of the new configuration; of the earlier run one
checkpoint is read, and that once: a run that has begun resumes from its own files.

The settings of the model are the checkpoint's. Those that the configuration gives must agree with
them, but for dropout, which has no weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel
from safetensors.torch import load_file

from mttrain.checkpoint import (
    ModelBundle,
    Tokenizers,
    check_tokenizers,
    load_model,
    load_tokenizers,
    model_settings,
    read_meta,
    resolve_model,
    verify,
)
from mttrain.config import OF_TRAINING, RunConfig, parse_config
from mttrain.errors import CheckpointError, ConfigError
from mttrain.rundir import SHARED, WEIGHTS
from mttrain.tags import meta_tags, note_tag

KEY = "train.init_from"


def with_origin(config: RunConfig, begun: RunConfig | None) -> RunConfig:
    """The configuration with the model and the vocabulary's kind of the checkpoint it begins with.

    begun: the settings of the run that would be resumed. Without `train.init_from` nothing changes.
    ConfigError for settings that contradict the checkpoint, CheckpointError when it cannot be read.
    """
    if config.train.init_from is None:
        return config
    run_dir = Path(config.run_dir).resolve()
    if Path(config.train.init_from).resolve().is_relative_to(run_dir):
        raise ConfigError(
            f"{KEY} {config.train.init_from} lies in run_dir {config.run_dir} itself; name another "
            "run_dir: the first model stays as it is."
        )
    if begun is not None:
        model = begun.model
        vocabulary = begun.tokenizer.model_dump(include={"shared", "vocab_size"})
    else:
        folder = origin_folder(config)
        model = model_settings(folder, read_meta(folder))
        size = max(tokenizer.size for tokenizer in load_tokenizers(folder))
        vocabulary = {"shared": (folder / SHARED).exists(), "vocab_size": size}
    its = model.model_dump(exclude=set(OF_TRAINING))
    problems = _contradictions("model", config.model, its)
    problems += _contradictions("tokenizer", config.tokenizer, vocabulary)
    if problems:
        text = "".join(f"\n  {problem}" for problem in problems)
        raise ConfigError(
            f"{KEY} {config.train.init_from}: training cannot begin with these weights:{text}"
        )
    # Checked as a whole once more.
    values = config.model_dump(mode="json")
    kept = config.model.model_dump(include=set(OF_TRAINING), exclude_unset=True)
    values["model"] = model.model_dump(mode="json") | kept
    values["tokenizer"] |= vocabulary
    return parse_config(values, name=KEY)


def _contradictions(section: str, asked: BaseModel, its: dict[str, Any]) -> list[str]:
    """What the configuration says itself, and otherwise than the checkpoint."""
    return [
        f"{section}.{name} is {getattr(asked, name)}, but it is {its[name]} there; remove it"
        for name in sorted(asked.model_fields_set & its.keys())
        if getattr(asked, name) != its[name]
    ]


def origin_folder(config: RunConfig) -> Path:
    """The directory of the checkpoint that training begins with."""
    assert config.train.init_from is not None
    path = Path(config.train.init_from)
    try:
        folder = resolve_model(path)
    except CheckpointError as error:
        raise CheckpointError(f"{KEY}: {error}") from None
    if not (folder / WEIGHTS).exists():
        raise CheckpointError(
            f"{KEY}: {folder} holds no {WEIGHTS}; of an export, name the run that it was made of."
        )
    return folder


def origin_tokenizers(config: RunConfig) -> Tokenizers:
    """Its tokenizers, compared with its meta.json."""
    folder = origin_folder(config)
    tokenizers = load_tokenizers(folder)
    check_tokenizers(read_meta(folder), tokenizers, folder)
    return tokenizers


def origin_model(config: RunConfig, tokenizers: Tokenizers) -> ModelBundle:
    """The model itself; CheckpointError when it is not the one that the run was made for."""
    bundle = load_model(origin_folder(config))
    check_tokenizers(bundle.meta, tokenizers, bundle.path)
    its, mine = bundle.model.config, config.model
    kept = {name: getattr(mine, name) for name in OF_TRAINING}
    if its.model_copy(update=kept) != mine:
        raise CheckpointError(
            f"{KEY}: {bundle.path} is another model than when this run was begun; use --fresh."
        )
    return bundle


def check_origin(config: RunConfig) -> None:
    """CheckpointError when its files are damaged, or a weight is no number."""
    folder = origin_folder(config)
    verify(folder)
    for name, weight in load_file(folder / WEIGHTS).items():
        if not bool(weight.isfinite().all()):
            raise CheckpointError(
                f"{KEY}: {name} of {folder} is not finite; begin with another checkpoint."
            )


def origin_record(bundle: ModelBundle) -> dict[str, Any]:
    """What a checkpoint and the log say of where training began, and what it was trained with."""
    return {
        "path": str(bundle.path),
        "step": bundle.meta["step"],
        "weights_sha256": bundle.meta["files"][WEIGHTS],
        "tags": meta_tags(bundle.meta, bundle.path),
        "untagged": bundle.meta.get("untagged", True),
    }


def with_origin_tags(content: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    """What meta.json says, with the tags of an origin: its weights have learned them, too.

    record: as `origin_record` makes it, or an older one without tags.
    """
    tags = dict(record.get("tags", {}))
    for tag, lang in content["tags"].items():
        note_tag(tags, tag, lang)
    untagged = content["untagged"] or record.get("untagged", False)
    return {**content, "tags": tags, "untagged": untagged, "init_from": record}
