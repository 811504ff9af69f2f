"""A new checkpoint from the mean of others: which ones, may they be averaged, where does it go.

The directory appears whole under its name or not at all, and stands outside every run: no index
names it, and nothing that tidies up a run can take it for one of its own. Its meta.json says what
it is the mean of: paths, updates, scores, and the SHA-256 of the weights.

Price: memory for three models (a sum in float64 and the one being added), reading each file twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from mttrain.checkpoint import (
    average_checkpoints,
    load_model,
    model_settings,
    read_meta,
    save_checkpoint,
)
from mttrain.config import OF_TRAINING
from mttrain.corpus import sync_directory
from mttrain.errors import CheckpointError, ConfigError
from mttrain.rundir import (
    INDEX,
    META,
    WEIGHTS,
    checkpoint_names,
    read_index,
    remove_leftover,
    write_refusals,
)

# Of meta.json; the same in all.
_KEPT = ("source_lang", "target_lang", "max_length", "decode", "tags", "untagged")


@dataclass
class Average:
    """What was made."""

    parameters: int
    members: list[dict[str, Any]]
    warnings: list[str] = field(default_factory=list)


def chosen_checkpoints(run: Path, *, last: int | None, best: int | None) -> list[Path]:
    """The newest or the best checkpoints of a run; CheckpointError when it has not so many.

    An average that the run itself has made is not among them.
    """
    names = checkpoint_names(run)
    if not names:
        raise CheckpointError(f"{run} holds no checkpoints; give the directory of a run.")
    if best is not None:
        names = [name for name in read_index(run).ranked() if name in names]
    wanted = last or best or 0
    if len(names) < wanted:
        what = "checkpoints with a score" if best else "checkpoints"
        raise CheckpointError(
            f"{run} has {len(names)} {what}, not {wanted}; train.keep_last keeps more of them."
        )
    names = names[-wanted:] if best is None else names[:wanted]
    return [run / "checkpoints" / name for name in names]


def check_output(output: Path) -> None:
    """Refuse a directory that has something in it, or lies inside a run or a checkpoint."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output {output} exists; name another directory, or remove it first.")
    real = output.resolve()
    if not real.parent.is_dir():
        raise ConfigError(f"--output {output}: the folder {real.parent} does not exist.")
    for folder in real.parents:
        run = (folder / "checkpoints" / INDEX).exists() or (folder / INDEX).exists()
        if run or (folder / META).exists():
            what = "run" if run else "checkpoint"
            raise ConfigError(
                f"--output {output} lies inside the {what} {folder}, which tidies up its own "
                "directory; name one outside."
            )


def average_into(folders: Sequence[Path], output: Path) -> Average:
    """Average the checkpoints into a new checkpoint directory.

    CheckpointError when they are not of one kind or cannot be read or written.
    """
    metas = [read_meta(folder) for folder in folders]
    _check_alike(folders, metas)
    bundle = load_model(folders[0])  # are its own settings and tensors in order?
    parameters = bundle.model.parameter_count()
    model = bundle.model.to("meta")  # its memory goes; the settings and names remain
    weights = average_checkpoints(folders)
    members = [
        {
            "path": str(folder.resolve()),
            "step": meta["step"],
            "weights_sha256": meta["files"][WEIGHTS],
            "scores": meta.get("scores", {}),
        }
        for folder, meta in zip(folders, metas, strict=True)
    ]
    newest = max(metas, key=lambda meta: int(meta["step"]))
    content = {name: newest[name] for name in _KEPT if name in newest}
    hashes = newest.get("text_hashes")
    if hashes is not None and all(meta.get("text_hashes") == hashes for meta in metas):
        content["text_hashes"] = hashes
    content |= {"scores": {}, "averaged": members}
    tokenizers = bundle.source_tokenizer, bundle.target_tokenizer
    with write_refusals(output):
        aside = Path(mkdtemp(prefix=".tmp-average-", dir=output.resolve().parent))
        try:
            made = save_checkpoint(
                aside, newest["step"], model, content, tokenizers, None, name="average",
                weights=weights,
            )  # fmt: skip
            made.rename(output)
            sync_directory(output.resolve().parent)
        finally:
            remove_leftover(aside)
    return Average(parameters, members, _warnings(folders, metas))


def _check_alike(folders: Sequence[Path], metas: Sequence[Mapping[str, Any]]) -> None:
    """Weights of one name and shape may still mean something else: the other settings decide."""
    seen: dict[Path, Path] = {}
    for folder in folders:
        real = folder.resolve()
        if real in seen:
            raise CheckpointError(f"{folder} is named twice; each checkpoint counts once.")
        seen[real] = folder
    first = metas[0]
    wanted = _settings(folders[0], first)
    for folder, meta in zip(folders[1:], metas[1:], strict=True):
        for name, its in _settings(folder, meta).items():
            mine = wanted[name]
            if mine != its and name not in OF_TRAINING:
                raise CheckpointError(
                    f"{folder} and {folders[0]} have other models: {name} is {its} and {mine}."
                )
        for name in ("source_lang", "target_lang"):
            if meta.get(name) != first.get(name):
                raise CheckpointError(f"{folder} and {folders[0]} have other languages: {name}.")


def _settings(folder: Path, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Of the model, those included that are younger than the checkpoint."""
    vocab = {name: meta["model"].get(name) for name in ("source_vocab", "target_vocab")}
    return model_settings(folder, meta).model_dump() | vocab


def _warnings(folders: Sequence[Path], metas: Sequence[Mapping[str, Any]]) -> list[str]:
    """What makes an average that is worth nothing."""
    if len({folder.resolve().parent for folder in folders}) == 1:
        return []
    return [
        "these checkpoints lie in different runs; the mean of models that were trained apart "
        "translates nothing, unless one began with the weights of the other."
    ]
