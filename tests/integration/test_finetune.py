"""Training that begins with another model's weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mttrain.checkpoint import load_model, load_train_state, read_index
from mttrain.cli import main
from mttrain.config import RunConfig, load_config
from mttrain.errors import CheckpointError, ConfigError
from mttrain.rundir import WEIGHTS
from mttrain.trainer import train
from tests.integration.test_resume import stop_at
from tests.integration.training_help import random_sentences, tiny_config, write_pairs
from tests.system.compare_help import differences, records
from tests.unit.test_hostile_files import sign

SIZES = {"d_model": 24, "d_ff": 40, "num_heads": 3, "encoder_layers": 1, "decoder_layers": 2}


def text(folder: Path, seed: int) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    lines, valid = random_sentences(60, seed=seed), random_sentences(10, seed=seed + 1)
    return {
        "train": write_pairs(folder, "train", [(line, line) for line in lines]),
        "valid": write_pairs(folder, "valid", [(line, line) for line in valid]),
    }


@pytest.fixture(scope="module", params=[True, False], ids=["shared", "separate"])
def first(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose model is not the default one."""
    folder = tmp_path_factory.mktemp("first")
    how = {"shared": request.param}
    tie = {"tie": "all" if request.param else "none"}
    config = tiny_config(
        folder, text(folder, 3), model={**SIZES, **tie}, tokenizer=how,
        train={"max_steps": 12, "valid_every": 6, "average": 2, "keep_last": 2},
    )  # fmt: skip
    return train(config).run_dir


def settings(folder: Path, origin: Path, seed: int = 5, **sections: Any) -> RunConfig:
    """Of a run on other text that begins with `origin`, as a user's file gives them: without what
    the origin decides."""
    config = tiny_config(folder, text(folder.parent / f"text{seed}", seed))
    values = config.model_dump(mode="json")
    del values["tokenizer"], values["model"]
    values["train"] |= {"init_from": str(origin), "average": 0}
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return RunConfig.model_validate(values, strict=False)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_model(folder).model.named_parameters())


def test_begins_with_the_weights_and_the_vocabulary(first: Path, tmp_path: Path) -> None:
    """Fine-tuning that begins with new weights, with another vocabulary or with the old optimiser
    is only slow training."""
    origin = load_model(first)
    still = {"lr": 1e-30, "warmup_steps": 0, "schedule": "constant"}
    limits = {"max_steps": 1, "valid_every": 1, "ema": 0.9}
    config = settings(tmp_path, first, optim=still, train=limits)
    run = train(config).run_dir
    made = load_model(run)
    mine, its = weights(run), dict(origin.model.named_parameters())
    assert mine.keys() == its.keys()
    assert all(torch.equal(mine[name], its[name]) for name in mine)
    assert made.source_tokenizer.hash == origin.source_tokenizer.hash
    assert made.target_tokenizer.hash == origin.target_tokenizer.hash
    state = load_train_state(run / "checkpoints" / "step-00000001")
    steps = [v.item() for name, v in state.tensors.items() if name.endswith(":step")]
    assert steps and set(steps) == {1.0}
    means = {k.removesuffix(":ema"): v for k, v in state.tensors.items() if k.endswith(":ema")}
    assert means.keys() == its.keys() and all(torch.equal(means[name], its[name]) for name in its)
    before, after = records(run, "valid")
    assert before["step"] == 0 and before["nll"] == pytest.approx(after["nll"], rel=1e-5)
    known = made.meta["init_from"]
    assert Path(known["path"]) == origin.path and known["step"] == origin.meta["step"]
    assert known["weights_sha256"] == origin.meta["files"]["model.safetensors"]


def test_settings_that_contradict_the_weights(first: Path, tmp_path: Path) -> None:
    """All of them are named at once; dropout may differ, and what agrees may stand there."""
    config = settings(tmp_path / "a", first, model={"d_model": 48, "norm": "post", "num_heads": 3})
    with pytest.raises(ConfigError) as caught:
        train(config)
    message = str(caught.value)
    assert "model.d_model is 48, but it is 24 there" in message
    assert "model.norm is post, but it is pre there" in message and "num_heads" not in message
    assert not Path(config.run_dir).exists()
    config = settings(tmp_path / "b", first, model={"dropout": 0.05}, train={"max_steps": 1})
    kept = load_config(train(config).run_dir / "config.yaml")
    assert kept.model.dropout == 0.05 and kept.model.d_model == 24


def test_a_run_that_has_begun_needs_the_origin_no_more(
    first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R14: stopped and resumed it is the uninterrupted run to the bit, also when the first model
    has gone in between."""
    origin = tmp_path / "origin"
    shutil.copytree(first, origin)
    whole = train(settings(tmp_path / "whole", origin)).run_dir
    config = settings(tmp_path / "cut", origin)
    with monkeypatch.context() as patch:
        stop_at(patch, "_update", 7, before=False)
        assert train(config).reason == "SIGTERM"
    shutil.rmtree(origin)
    cut = train(config).run_dir
    assert differences(cut, whole, 12) == []
    assert load_model(cut).meta["init_from"] == load_model(whole).meta["init_from"]
    with pytest.raises(CheckpointError, match=r"train.init_from: .*origin does not exist"):
        train(settings(tmp_path / "third", origin))


@pytest.mark.parametrize("average", [0, 2])
def test_training_that_makes_nothing_better_says_so(
    average: int, first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fine-tuned model that is worse than the first must not be taken for progress; with an
    average at the end, as by default, nothing was said."""
    wild = {"lr": 0.5, "warmup_steps": 0, "schedule": "constant"}
    means = {"average": average, "keep_last": 2, "average_of": "both"} if average else {}
    limits = {"best_metric": "nll", **means}
    train(settings(tmp_path, first, seed=3, optim=wild, train=limits))
    assert "no validation has a better nll than the weights" in capsys.readouterr().err


def test_the_dry_run_knows_the_origin(first: Path, tmp_path: Path) -> None:
    """It would train another model otherwise; of a run that has begun it needs no origin."""
    config = settings(tmp_path, first, train={"max_steps": 1})
    result = train(config, dry_run=True)
    assert result.reason == "dry_run" and not Path(config.run_dir).exists()
    origin = tmp_path / "origin"
    shutil.copytree(first, origin)
    config = settings(tmp_path, origin, train={"max_steps": 1})
    train(config)
    shutil.rmtree(origin)
    assert train(config, dry_run=True).reason == "dry_run"


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("fresh", [False, True])
def test_the_first_model_is_never_emptied(first: Path, tmp_path: Path, fresh: bool) -> None:
    """--fresh once removed the very weights that training was to begin with (R13)."""
    own = tmp_path / "run"
    shutil.copytree(first, own)
    before = files(own)
    for origin in (own, next((own / "checkpoints").glob("step-*"))):
        with pytest.raises(ConfigError, match="lies in run_dir"):
            train(settings(tmp_path, origin), fresh=fresh)
    assert files(own) == before


@pytest.mark.parametrize("fault", ["damaged", "export", "nan", "tag"])
def test_a_bad_origin_costs_no_earlier_run(first: Path, tmp_path: Path, fault: str) -> None:
    """--fresh must look at what it is to begin with before it empties the directory."""
    train(settings(tmp_path, first, train={"max_steps": 1}))
    before = files(tmp_path / "run")
    origin = tmp_path / "origin"
    shutil.copytree(load_model(first).path, origin)
    config = settings(tmp_path, origin)
    if fault == "damaged":
        (origin / "model.safetensors").write_bytes(b"x" * 100)
    elif fault == "export":
        (origin / "model.safetensors").unlink()
    elif fault == "nan":
        broken = {name: w.fill_(torch.nan) for name, w in load_file(origin / WEIGHTS).items()}
        save_file(broken, origin / WEIGHTS)
        sign(origin)
    else:
        corpus = config.data.train[0].model_copy(update={"tag": "bt"})
        plain = config.data.train[0]
        config = config.model_copy(
            update={"data": config.data.model_copy(update={"train": [plain, corpus]})}
        )
    messages = {
        "damaged": "is damaged", "export": "of an export", "nan": "not finite",
        "tag": "lacks the tags",
    }  # fmt: skip
    with pytest.raises((CheckpointError, ConfigError), match=messages[fault]):
        train(config, fresh=True)
    assert files(tmp_path / "run") == before


def test_stopped_before_the_first_update(
    first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The score of the first model once went to the checkpoint of update 0, which was then taken
    for one of the run's own."""
    config = settings(tmp_path, first)
    with monkeypatch.context() as patch:
        stop_at(patch, "_validate_if_due", 0, before=True)
        result = train(config)
    assert result.reason == "SIGTERM"
    assert not any(read_index(Path(config.run_dir)).scores.values())


def test_a_size_of_the_vocabulary_may_be_named_if_it_is_that(first: Path, tmp_path: Path) -> None:
    """One file for both halves of a training in two was refused; another size is still told."""
    bundle = load_model(first)
    size = max(bundle.source_tokenizer.size, bundle.target_tokenizer.size)
    config = settings(tmp_path, first, tokenizer={"vocab_size": size})
    assert train(config, dry_run=True).reason == "dry_run"
    with pytest.raises(ConfigError, match=rf"vocab_size is 900, but it is {size} there"):
        train(settings(tmp_path, first, tokenizer={"vocab_size": 900}))


def test_what_config_prints_is_what_is_trained(
    first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`mttrain config` showed the default model for a file with init_from."""
    config = settings(tmp_path, first)
    file = tmp_path / "finetune.yaml"
    values = config.model_dump(mode="json")
    del values["tokenizer"], values["model"]
    file.write_text(json.dumps(values))
    assert main(["config", "--config", str(file)]) == 0
    (tmp_path / "whole.yaml").write_text(capsys.readouterr().out)
    whole = load_config(tmp_path / "whole.yaml")
    assert whole.model.d_model == 24 and train(whole, dry_run=True).reason == "dry_run"


def test_the_tags_of_the_origin_are_kept(tmp_path: Path) -> None:
    """A model of two directions that was fine-tuned on one refused the other one's tag, so that
    nobody could see what was forgotten."""
    data = text(tmp_path / "text", 3)
    pairs = data["train"]
    corpora = [{**pairs, "tag": "2yy"}, {**pairs, "target_lang": "zz", "tag": "2zz"}]
    limits = {"max_steps": 2, "valid_every": 2, "average": 0}
    both = {**data, "train": corpora, "valid": {**data["valid"], "tag": "2yy"}}
    origin = train(tiny_config(tmp_path, both, train=limits)).run_dir
    tuned = settings(tmp_path / "tuned", origin, train={"max_steps": 1, "valid_every": 1})
    meta = load_model(train(tuned).run_dir).meta
    assert meta["tags"] == {"2yy": "yy", "2zz": "zz"} and meta["untagged"] is True
    (one,) = tuned.data.train
    again = tuned.data.model_copy(
        update={
            "train": [one.model_copy(update={"tag": "2zz"})],
            "valid": tuned.data.valid.model_copy(update={"tag": "2zz"}),
        }
    )
    config = settings(tmp_path / "again", origin).model_copy(update={"data": again})
    meta = load_model(train(config).run_dir).meta
    assert meta["tags"] == {"2yy": "yy", "2zz": None} and meta["untagged"] is False
