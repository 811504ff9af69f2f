"""COMET (Rei et al. 2020) beside BLEU: a trained model judges source, translation and reference.

The model is a directory or file that the user names; nothing is ever downloaded. Its checkpoint is
a pickle, read by the `comet` package: loading one can run code that it brings. It is the one file
of strangers that mttrain has opened that way, and only by its explicit path, so take it from
people whom you would let run a program.

The corpus score is the mean of the sentence scores, as in COMET's own command; intervals and the
paired test resample sentences as sacreBLEU does for the other metrics. Of several references the
first is used. Price: the usual model (0.6 billion weights) takes 3 GB of memory and some 0.5 s a
sentence on a CPU core.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mttrain.errors import CheckpointError, ConfigError, DataError, MissingDependency
from mttrain.metrics import SEED, Comparison, Score

_PACKAGE = "unbabel-comet"
_INSTALL = "pip install 'mttrain[comet]'"
_HUB_NAME = re.compile(r"(?:([\w.-]+)/)?([\w.-]+)")
_CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)")
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_BATCH = 16  # sentences
_HPARAMS_LIMIT = 1 << 20  # bytes


class CometScore(Score):
    """A score on COMET's own scale, where most lie between 0 and 1."""

    def text(self) -> str:
        spread = f" (μ = {self.ci[0]:.4f} ± {self.ci[1]:.4f})" if self.ci else ""
        return f"COMET|{self.signature} = {self.value:.4f}{spread}"


class CometComparison(Comparison):
    """Two systems on that scale."""

    def text(self) -> str:
        sure = "significant" if self.p_value < 0.05 else "not significant"
        (mean, half), (other, width) = self.baseline_ci, self.system_ci
        return (
            f"COMET|{self.signature} : baseline {self.baseline:.4f} (μ = {mean:.4f} ± {half:.4f}), "
            f"system {self.system:.4f} (μ = {other:.4f} ± {width:.4f}), difference "
            f"{self.delta:+.4f}, p = {self.p_value:.4f} ({sure} at 0.05)"
        )


@dataclass(frozen=True)
class CometModel:
    """A model found on disk, not yet loaded."""

    checkpoint: Path
    name: str
    kind: str  # class_identifier of its hparams.yaml
    encoder: str  # name or folder of the encoder's tokenizer and configuration

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the checkpoint: models of one name come in versions."""
        with open(self.checkpoint, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def signature(self, references: int) -> str:
        """What made the number, in the manner of sacreBLEU."""
        version = importlib.metadata.version(_PACKAGE)
        return (
            f"model:{self.name}|sha256:{self.digest[:12]}|class:{self.kind}|refs:{references}|"
            f"version:{version}"
        )


def find_comet(path: str) -> CometModel:
    """The model at `path`: a .ckpt file, or the directory above its `checkpoints/`.

    Reads no weights. MissingDependency without the package; ConfigError for what is no local file,
    with how to get it; CheckpointError for a directory that is no COMET model.
    """
    if importlib.util.find_spec("comet") is None:
        raise MissingDependency(f"--comet needs a package that is not installed: {_INSTALL}.")
    if not os.path.exists(path):
        raise ConfigError(_not_here(path))
    place = Path(path).resolve()
    if place.is_dir():
        inside = [place, *sorted(place.glob("snapshots/*"))]  # those of the cache of a hub
        found = [one for folder in inside if (one := folder / "checkpoints/model.ckpt").is_file()]
        if len(found) != 1:
            raise CheckpointError(
                f"{path}: {len(found) or 'no'} checkpoints/model.ckpt below it; give the directory "
                "of one COMET model, or its .ckpt file."
            )
        (place,) = found
    folder = place.parents[1]
    values = _hparams(folder / "hparams.yaml")
    cached = _CACHED.search(str(folder))
    name = f"{cached[1]}/{cached[2]}" if cached else folder.name
    return CometModel(place, name, values["class_identifier"], values["pretrained_model"])


def _not_here(path: str) -> str:
    found = _HUB_NAME.fullmatch(path)
    if found is None:
        return f"--comet {path}: no such file or directory."
    name = f"{found[1] or 'Unbabel'}/{found[2]}"
    return (
        f"--comet {path}: no such file or directory, and nothing is downloaded. Where there is a "
        f"network, get the model once with: hf download {name} --local-dir {found[2]}; then give "
        f"that directory: --comet {found[2]}."
    )


def _hparams(path: Path) -> dict[str, str]:
    """What is needed of a model's hparams.yaml."""
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file.read(_HPARAMS_LIMIT))
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot read it: {error.strerror}. A COMET model is a directory with "
            "hparams.yaml and checkpoints/model.ckpt."
        ) from None
    except (ValueError, yaml.YAMLError) as error:
        raise CheckpointError(f"{path}: not YAML: {' '.join(str(error).split())[:200]}.") from None
    values = content if isinstance(content, dict) else {}
    for key in ("class_identifier", "pretrained_model"):
        if not isinstance(values.get(key), str):
            raise CheckpointError(f"{path}: {key} is missing; it is that of no COMET model.")
    return values


def sentence_scores(
    model: CometModel,
    systems: Sequence[Sequence[str]],
    sources: Sequence[str],
    references: Sequence[str],
    *,
    device: str = "auto",
) -> tuple[list[list[float]], int]:
    """The scores of each system's lines, in their order, and how many references count: 0 or 1.

    All texts are equally long. device: auto is a GPU where there is one. Nothing is downloaded.
    CheckpointError when the model, or what it needs beside it, cannot be loaded.
    """
    for lines in (*systems, references):
        assert len(lines) == len(sources), "held by the caller"
    if not sources:
        raise DataError("There are no lines to score with COMET.")
    with _quiet(), _offline():
        loaded = _load(model)
        import torch

        gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
        uses = int(bool(loaded.requires_references()))
        scores = []
        for hyps in systems:
            rows = [
                {"src": source, "mt": hyp} | ({"ref": reference} if uses else {})
                for source, hyp, reference in zip(sources, hyps, references, strict=True)
            ]
            found = loaded.predict(
                rows, batch_size=_BATCH, gpus=int(gpu), num_workers=0, progress_bar=False
            )
            scores.append([float(score) for score in found["scores"]])
    return scores, uses


def _load(model: CometModel) -> Any:
    try:
        from comet import load_from_checkpoint
    except ImportError as error:
        hint = _INSTALL
        if "pkg_resources" in str(error):  # gone from setuptools 81, but some versions want it
            hint = "pip install 'setuptools<81'"
        raise MissingDependency(f"COMET cannot be imported: {error}. Try {hint}.") from None
    try:
        return load_from_checkpoint(str(model.checkpoint), local_files_only=True)
    except Exception as error:
        # The package raises bare Exceptions and those of four libraries.
        text = " ".join(str(error).split())[:200]
        if isinstance(error, OSError) and not os.path.exists(model.encoder):
            text = (
                f"its encoder {model.encoder} is not on this machine, and nothing is downloaded. "
                f"Where there is a network: hf download {model.encoder} --include '*.json' "
                "'*.model'; or let pretrained_model in its hparams.yaml and checkpoint name a "
                "folder with these files"
            )
        raise CheckpointError(f"{model.checkpoint}: cannot load it: {text}.") from None


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Keep the libraries of the hub from looking for anything outside."""
    before = {name: os.environ.get(name) for name in _OFFLINE}
    os.environ.update(dict.fromkeys(_OFFLINE, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Lightning tells of devices and advertises; only errors are let through."""
    names = ("pytorch_lightning", "lightning", "comet", "transformers")
    levels = {name: logging.getLogger(name).level for name in names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            logging.getLogger(name).setLevel(logging.ERROR)
        try:
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)


# ---- numbers ----------------------------------------------------------------------------------


def corpus_score(
    scores: Sequence[float], signature: str, *, bootstrap: int = 0, seed: int = SEED
) -> CometScore:
    """The mean; with `bootstrap` resamples and its 95 % interval."""
    means = _resampled([scores], bootstrap, seed)
    ci = _interval(means[0]) if bootstrap else None
    return CometScore("COMET", sum(scores) / len(scores), signature, ci)


def compare(
    baseline: Sequence[float],
    system: Sequence[float],
    signature: str,
    *,
    samples: int = 1000,
    seed: int = SEED,
) -> CometComparison:
    """Paired bootstrap resampling (Koehn 2004) as sacreBLEU does it: p is the share of resamples
    whose difference is further from their mean difference than the real one is from 0."""
    import numpy as np

    before, after = sum(baseline) / len(baseline), sum(system) / len(system)
    one, two = _resampled([baseline, system], samples, seed)
    differences = np.abs(two - one)
    beyond = int((differences - differences.mean() > abs(after - before)).sum())
    return CometComparison(
        name="COMET",
        baseline=before,
        system=after,
        p_value=1.0 if before == after else (beyond + 1) / (samples + 1),
        baseline_ci=_interval(one),
        system_ci=_interval(two),
        signature=signature,
    )


def _resampled(systems: Sequence[Sequence[float]], samples: int, seed: int) -> Any:
    """[systems, samples]: means over the same sentences, drawn with replacement."""
    import numpy as np

    rows = np.asarray(systems, dtype=np.float64)
    generator = np.random.default_rng(seed)
    size = rows.shape[1]
    found = np.empty((len(rows), samples))
    for sample in range(samples):
        found[:, sample] = rows[:, generator.integers(size, size=size)].mean(axis=1)
    return found


def _interval(means: Any) -> tuple[float, float]:
    from sacrebleu.significance import estimate_ci

    mean, half = estimate_ci(means)
    return float(mean), float(half)
