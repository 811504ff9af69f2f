"""Checkpoint directories: bit-equal round trips, and every way in which a save or file fails."""

from __future__ import annotations

import json
import math
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mttrain.checkpoint import (
    Index,
    TrainState,
    average_checkpoints,
    checkpoint_names,
    load_model,
    load_train_state,
    newest_good,
    prune,
    read_index,
    resolve_model,
    save_checkpoint,
    verify,
    write_index,
)
from mttrain.config import ModelConfig
from mttrain.errors import CheckpointError
from mttrain.model import Transformer
from mttrain.tokenizer import Tokenizer, train_tokenizer

TEXT = ["a dog runs over the green grass", "two men watch it from an old red car"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXT * 3, vocab_size=300)


@pytest.fixture(scope="module")
def other() -> Tokenizer:
    """Of the same size, with another order of entries."""
    return train_tokenizer([line[::-1] for line in TEXT] * 3, vocab_size=300)


def model_of(source: Tokenizer, target: Tokenizer, seed: int = 1, **settings: Any) -> Transformer:
    torch.manual_seed(seed)
    config = ModelConfig(
        d_model=8, d_ff=16, num_heads=2, encoder_layers=1, decoder_layers=1, **settings
    )
    return Transformer(config, source.size, target.size)


META = {"source_lang": "en", "target_lang": "de", "max_length": 256, "scores": {"bleu": 1.5}}


def state_of(step: int) -> TrainState:
    return TrainState(
        {"a:exp_avg": torch.full((3, 2), 1 / 3), "a:step": torch.tensor(float(step))},
        {"progress": {"update": step, "best": 0.1 + 0.2}, "wait": [1, None, True]},
    )


def save(
    run: Path,
    step: int,
    tokenizer: Tokenizer,
    *,
    state: bool = True,
    seed: int = 1,
    **settings: Any,
) -> Path:
    model = model_of(tokenizer, tokenizer, seed, **settings)
    both = (tokenizer, tokenizer)
    return save_checkpoint(run, step, model, META, both, state_of(step) if state else None)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ---- round trips ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"tie": "all"},
        {"tie": "target", "norm": "pre"},
        {"tie": "none", "activation": "swiglu"},
        {"positions": "learned", "max_positions": 20},
    ],
)
def test_model_comes_back_bit_equal(
    tmp_path: Path, tokenizer: Tokenizer, settings: dict[str, Any]
) -> None:
    """R14, contract 7: a tied matrix that is two after loading drifts apart in the next training;
    a setting that is not stored changes the model without an error."""
    model = model_of(tokenizer, tokenizer, **settings).eval()
    path = save_checkpoint(tmp_path, 1000, model, META, (tokenizer, tokenizer), None)
    assert path == tmp_path / "checkpoints" / "step-00001000"
    before = torch.get_rng_state()
    bundle = load_model(path)
    assert torch.equal(torch.get_rng_state(), before)  # R19
    loaded = bundle.model
    assert not loaded.training
    assert loaded.config == model.config
    wanted, found = dict(model.named_parameters()), dict(loaded.named_parameters())
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    tied = loaded.lm_head.weight is loaded.decoder.embed_tokens.weight
    assert tied == (settings.get("tie") != "none")
    source, target = torch.tensor([[5, 6, 3]]), torch.tensor([[2, 7]])
    assert torch.equal(loaded(source, target), model(source, target))
    assert bundle.source_tokenizer is bundle.target_tokenizer
    assert bundle.source_tokenizer.hash == tokenizer.hash
    for key, value in META.items():
        assert bundle.meta[key] == value
    assert bundle.meta["step"] == 1000


def test_two_tokenizers_keep_their_sides(
    tmp_path: Path, tokenizer: Tokenizer, other: Tokenizer
) -> None:
    """X02: with two vocabularies of one size, swapped sides give nonsense and no error."""
    model = model_of(tokenizer, other, tie="target")
    path = save_checkpoint(tmp_path, 1, model, META, (tokenizer, other), None)
    bundle = load_model(path)
    assert bundle.source_tokenizer.hash == tokenizer.hash
    assert bundle.target_tokenizer.hash == other.hash


def test_training_state_comes_back_bit_equal(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """R02, R14: numbers rounded on the way out make a resumed run another run."""
    path = save(tmp_path, 7, tokenizer)
    state, wanted = load_train_state(path), state_of(7)
    assert state.values == wanted.values
    assert state.tensors.keys() == wanted.tensors.keys()
    for name, tensor in wanted.tensors.items():
        assert torch.equal(state.tensors[name], tensor)
        assert state.tensors[name].dtype == tensor.dtype
    without = save(tmp_path, 8, tokenizer, state=False)
    with pytest.raises(CheckpointError, match="no training state"):
        load_train_state(without)


def test_not_finite_scores_stay_valid_json(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """R01: a validation loss that is NaN gave a meta.json that no strict reader takes."""
    model = model_of(tokenizer, tokenizer)
    meta = {**META, "scores": {"nll": math.nan, "bleu": 0.0}}
    path = save_checkpoint(tmp_path, 1, model, meta, (tokenizer, tokenizer), None)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in meta.json")

    content = json.loads((path / "meta.json").read_text(), parse_constant=refuse)
    assert content["scores"] == {"nll": None, "bleu": 0.0}


def test_files_are_readable_as_the_umask_says(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The tensor library makes files for their owner alone: colleagues could not load the model."""
    old = os.umask(0o022)
    try:
        path = save(tmp_path, 1, tokenizer)
    finally:
        os.umask(old)
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o644}


# ---- saving goes wrong ------------------------------------------------------------------------


def test_full_disk_leaves_the_old_checkpoint_and_no_orphan(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """R09: a write that failed destroyed the good checkpoint, or left half a file behind."""
    path = save(tmp_path, 1, tokenizer)
    write_index(tmp_path, Index().added(path.name, {"bleu": 1.0}))
    before = contents(path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (0, len(before["model.safetensors"]) - 1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(CheckpointError, match=r"cannot write.*too large"):
                save(tmp_path, 2, tokenizer)
            with pytest.raises(CheckpointError, match="cannot write"):
                save(tmp_path, 1, tokenizer, seed=2)  # in place of the good one
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert contents(path) == before
        names = sorted(entry.name for entry in (tmp_path / "checkpoints").iterdir())
        assert names == ["index.json", "step-00000001"]
    load_model(tmp_path)


def test_unwritable_place_is_one_sentence(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """R09: a file where the folder should be gave a traceback at the first save."""
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match="cannot write") as caught:
        save(tmp_path, 1, tokenizer)
    assert "\n" not in str(caught.value)


KILLED = """
import sys
from pathlib import Path
import torch
from mttrain.checkpoint import Index, TrainState, save_checkpoint, write_index
from mttrain.config import ModelConfig
from mttrain.model import Transformer
from mttrain.tokenizer import Tokenizer
run = Path(sys.argv[1])
tokenizer = Tokenizer.load(run / "tokenizer.json")
config = ModelConfig(d_model=8, d_ff=16, num_heads=2, encoder_layers=1, decoder_layers=1)
model = Transformer(config, tokenizer.size, tokenizer.size)
for step in range(1, 100_000):
    state = TrainState({"a": torch.full((1000,), float(step))}, {"step": step})
    path = save_checkpoint(run, step % 7, model, {}, (tokenizer, tokenizer), state)
    write_index(run, Index().added(path.name, {}))
    if step == 1:
        print("ready", flush=True)
"""


def test_killed_while_saving(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """R08: SIGKILL in mid-save left a truncated file under the final name and lost the older one.
    New names and replaced ones alike; what has a name must load, and leftovers must go."""
    tokenizer.save(tmp_path / "tokenizer.json")
    for attempt in range(2):
        child = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE
        )
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        time.sleep(0.011 + 0.037 * attempt)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        good = newest_good(tmp_path)
        assert good is not None
        names = checkpoint_names(tmp_path)
        for name in names:
            verify(tmp_path / "checkpoints" / name)
        assert read_index(tmp_path).last in [*names, None]
        state = load_train_state(good)
        assert (state.tensors["a"] == state.values["step"]).all()
        load_model(tmp_path)
        prune(tmp_path, names)
        left = {path.name for path in (tmp_path / "checkpoints").iterdir()}
        assert {name for name in left if not name.startswith(".tmp-")} == {*names, "index.json"}
        assert not [name for name in left if (tmp_path / "checkpoints" / name).is_dir()
                    and name.startswith(".")]  # fmt: skip


def test_replacement_killed_between_its_two_renames(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """R08: an average that replaces an older one has no name for a moment; killed right then, the
    older one must come back."""
    path = save(tmp_path, 3, tokenizer)
    before = contents(path)
    path.rename(path.with_name(".old-step-00000003"))
    assert newest_good(tmp_path) == path
    assert contents(path) == before
    shutil.copytree(path, path.with_name(".old-step-00000003"))  # or killed just after them
    prune(tmp_path, {path.name})
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_same_step_is_replaced(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """R22: saving a step again, after a resume, failed because the folder was there."""
    save(tmp_path, 3, tokenizer, seed=1)
    path = save(tmp_path, 3, tokenizer, seed=2)
    wanted = model_of(tokenizer, tokenizer, seed=2).lm_head.weight
    assert torch.equal(load_model(path).model.lm_head.weight, wanted)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


# ---- index and rotation -----------------------------------------------------------------------


def test_rotation_keeps_the_right_end(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """R11, R06: with a metric to be minimised the best ones were removed. Two best of the losses
    5, 3, 4, 2 are those of steps 4 and 2."""
    index = Index(metric="nll")
    for step, loss in enumerate([5.0, 3.0, 4.0, 2.0], start=1):
        path = save(tmp_path, step, tokenizer)
        index = index.added(path.name, {"nll": loss, "bleu": loss})
        prune(tmp_path, set(index.ranked()[:2]))
    assert checkpoint_names(tmp_path) == ["step-00000002", "step-00000004"]
    assert index.best == "step-00000004" and index.last == "step-00000004"
    assert Index("bleu", scores=index.scores).ranked()[0] == "step-00000001"


def test_nan_is_never_best_and_a_tie_keeps_the_older() -> None:
    """R01, R06: NaN compares false to everything, so a sort puts it anywhere."""
    index = Index(metric="bleu").added("step-00000001", {"bleu": math.nan})
    assert index.best is None and index.last == "step-00000001"
    index = index.added("step-00000002", {"bleu": 12.0}).added("step-00000003", {"bleu": 12.0})
    index = index.added("step-00000004", {"bleu": math.inf}).added("step-00000005", {})
    assert (index.best, index.last) == ("step-00000002", "step-00000005")


def test_index_round_trip_and_resumed_best(tmp_path: Path) -> None:
    """R10: the best score was not restored, so the first validation after a resume replaced it."""
    (tmp_path / "checkpoints").mkdir()
    index = Index(metric="bleu").added("step-00000100", {"bleu": 20.0, "nll": 2.5})
    write_index(tmp_path, index)
    assert read_index(tmp_path) == index
    resumed = read_index(tmp_path).added("step-00000150", {"bleu": 12.0})
    assert resumed.best == "step-00000100" and resumed.last == "step-00000150"
    assert read_index(tmp_path / "new") == Index()


def test_prune_keeps_named_ones_and_strips_old_state(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Optimiser moments are twice the model: only the newest checkpoints need them."""
    for step in range(1, 5):
        save(tmp_path, step, tokenizer)
    average = save_checkpoint(
        tmp_path, 4, model_of(tokenizer, tokenizer), META, (tokenizer,) * 2, None, name="average"
    )
    (tmp_path / "checkpoints" / ".tmp-step-00000009-dead").mkdir()
    last = "step-00000004"
    prune(tmp_path, {"step-00000002", last}, keep_state={last})
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["average", "step-00000002", last]
    stripped = tmp_path / "checkpoints" / "step-00000002"
    verify(stripped)
    load_model(stripped)
    load_model(average)
    with pytest.raises(CheckpointError, match="no training state"):
        load_train_state(stripped)
    assert newest_good(tmp_path) == tmp_path / "checkpoints" / last


def test_run_can_be_moved(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R25, C05: the best was a link, or an absolute path, and gone after a move."""

    def no_links(*_: object) -> None:
        raise OSError("this file system has no links")

    monkeypatch.setattr(os, "symlink", no_links)
    monkeypatch.setattr(os, "link", no_links)
    run = tmp_path / "run"
    index = Index(metric="bleu")
    for step, bleu in ((1, 5.0), (2, 9.0), (3, 7.0)):
        index = index.added(save(run, step, tokenizer, seed=step).name, {"bleu": bleu})
    write_index(run, index)
    moved = tmp_path / "elsewhere" / "copy"
    moved.parent.mkdir()
    run.rename(moved)
    best = moved / "checkpoints" / "step-00000002"
    assert resolve_model(moved) == resolve_model(moved / "checkpoints") == best
    assert resolve_model(best) == best
    wanted = model_of(tokenizer, tokenizer, seed=2).lm_head.weight
    assert torch.equal(load_model(str(moved)).model.lm_head.weight, wanted)
    monkeypatch.chdir(moved)
    assert load_model(".").meta["step"] == 2
    assert not [p for p in moved.rglob("*") if str(tmp_path).encode() in _bytes(p)]


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def test_resolve_without_a_best(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """A run stopped before its first validation, or killed before its first index, translates."""
    save(tmp_path, 9, tokenizer)
    path = save(tmp_path, 10, tokenizer)
    assert resolve_model(tmp_path) == path
    write_index(tmp_path, Index(last="step-00000009"))
    assert resolve_model(tmp_path).name == "step-00000009"
    write_index(tmp_path, Index(best="average", last="step-00000009"))
    with pytest.raises(CheckpointError, match=r"average .*missing; give one of .*step-00000010"):
        resolve_model(tmp_path)
    for wrong, says in (
        (tmp_path / "nothing", "does not exist"),
        (tmp_path / "checkpoints" / "index.json", "is a file"),
    ):
        with pytest.raises(CheckpointError, match=says):
            load_model(wrong)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="no checkpoint"):
        load_model(tmp_path / "empty")


# ---- damaged and hostile files ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.safetensors", "training.safetensors", "training.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "empty"])
def test_damaged_file_is_refused(
    tmp_path: Path, tokenizer: Tokenizer, name: str, damage: str
) -> None:
    """R08: one flipped bit in the weights loads without an error and translates a little worse."""
    path = save(tmp_path, 1, tokenizer)
    file, content = path / name, (path / name).read_bytes()
    if damage == "flip":
        middle = len(content) // 2
        flipped = bytes([content[middle] ^ 1])
        file.write_bytes(content[:middle] + flipped + content[middle + 1 :])
    elif damage == "missing":
        file.unlink()
    else:
        file.write_bytes(content[:-1] if damage == "cut" else b"")
    with pytest.raises(CheckpointError) as caught:
        load_model(path)
        load_train_state(path)
    assert name in str(caught.value) or "no training state" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_newest_whole_checkpoint_is_taken(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """R08: one broken checkpoint, the newest, made the run impossible to resume; or resuming began
    from nothing and said nothing."""
    assert newest_good(tmp_path) is None
    paths = [save(tmp_path, step, tokenizer) for step in (1, 2, 3)]
    save(tmp_path, 4, tokenizer, state=False)
    with (paths[2] / "training.safetensors").open("ab") as file:
        file.write(b"x")
    told: list[str] = []
    assert newest_good(tmp_path, told.append) == paths[1]
    assert len(told) == 1 and "step-00000003" in told[0]
    for path in paths[:2]:
        (path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="--fresh"):
        newest_good(tmp_path)


def test_other_tokenizer_is_refused(tmp_path: Path, tokenizer: Tokenizer, other: Tokenizer) -> None:
    """R17: a vocabulary of the same size in another order gives fluent nonsense."""
    path = save(tmp_path, 1, tokenizer)
    assert other.size == tokenizer.size and other.hash != tokenizer.hash
    other.save(path / "tokenizer.json")
    with pytest.raises(CheckpointError, match="not the one this model was trained with"):
        load_model(path)
    with pytest.raises(CheckpointError):
        verify(path)
    two = save_checkpoint(
        tmp_path, 2, model_of(tokenizer, other, tie="none"), META, (tokenizer, other), None
    )
    (two / "tokenizer.source.json").rename(two / "t")
    (two / "tokenizer.target.json").rename(two / "tokenizer.source.json")
    (two / "t").rename(two / "tokenizer.target.json")
    with pytest.raises(CheckpointError, match="source tokenizer is not the one"):
        load_model(two)
    (two / "tokenizer.target.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.target\.json"):
        load_model(two)


def rewrite_meta(path: Path, **changes: Any) -> None:
    """meta.json as an attacker writes it: with hashes that fit the files."""
    from mttrain.corpus import file_sha256

    meta = json.loads((path / "meta.json").read_text())
    meta["files"] = {f.name: file_sha256(f) for f in path.iterdir() if f.name != "meta.json"}
    (path / "meta.json").write_text(json.dumps({**meta, **changes}))


class Touch:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (os.mkdir, (str(self.path),))


def test_nothing_is_unpickled(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """X06: loading somebody's checkpoint ran what was inside; through every door of ours."""
    touched = tmp_path / "touched"
    path = save(tmp_path, 1, tokenizer)
    torch.save({"model": Touch(touched)}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="is a file"):
        load_model(tmp_path / "model.pt")
    for content in ((tmp_path / "model.pt").read_bytes(), pickle.dumps(Touch(touched))):
        for name in ("model.safetensors", "training.safetensors", "training.json"):
            good = (path / name).read_bytes()
            (path / name).write_bytes(content)
            rewrite_meta(path)
            with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
                load_model(path)
                load_train_state(path)
            if name == "model.safetensors":
                with pytest.raises(CheckpointError):
                    average_checkpoints([path, path])
            (path / name).write_bytes(good)
    for name in ("meta.json", "tokenizer.json"):
        good = (path / name).read_bytes()
        (path / name).write_bytes(pickle.dumps(Touch(touched)))
        with pytest.raises(CheckpointError, match=name):
            load_model(path)
        (path / name).write_bytes(good)
    assert not touched.exists()


def test_hostile_meta_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """X06: a meta.json of 17 MB or a million brackets, wrong types, or a model of a terabyte must
    end in one sentence, at once."""
    path = save(tmp_path, 1, tokenizer)
    good = json.loads((path / "meta.json").read_text())
    model = good["model"]
    changes: list[dict[str, Any]] = [
        {"format": 2},
        {"format": ["deep"]},
        {"model": None},
        {"model": []},
        {"model": {}},
        {"model": {**model, "d_model": "wide"}},
        {"model": {**model, "d_model": 10**12, "num_heads": 1}},
        {"model": {**model, "d_ff": 10**12}},
        {"model": {**model, "d_ff": 10**40}},
        {"model": {**model, "encoder_layers": 10**9}},
        {"model": {**model, "decoder_layers": 2}},
        {"model": {**model, "unknown": 1}},
        {"model": {**model, "source_vocab": model["source_vocab"] + 1}},
        {"model": {**model, "source_vocab": True}},
        {"model": {**model, "tie": "none"}},
        {"model": {**model, "positions": "learned", "max_positions": 10**12}},
        {"files": "all"},
        {"files": {"model.safetensors": 5}},
        {"tokenizer_hash": {}},
        {"tokenizer_hash": 3},
        {"step": "1"},
        {"step": True},
    ]
    texts = [json.dumps({**good, **change}) for change in changes]
    texts += ["", "[]", "nul", "[" * 200_000, '{"a": ' * 200_000, "9" * 10_000, "\ud800x"]
    texts += [json.dumps(good) + " " * (17 << 20)]
    for text in texts:
        (path / "meta.json").write_bytes(text.encode("utf-8", "surrogatepass"))
        with pytest.raises(CheckpointError) as caught:
            load_model(path)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 600, text[:80]


def test_hostile_index_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """X06: an index that names ../../elsewhere must not make us read there."""
    save(tmp_path / "run", 1, tokenizer)
    path = tmp_path / "run" / "checkpoints" / "index.json"
    good = {"metric": "bleu", "last": None, "best": None, "scores": {}}
    for change in (
        {"best": "../../elsewhere"},
        {"last": "/etc"},
        {"best": 5},
        {"best": ".."},
        {"scores": {"a/b": {}}},
        {"scores": []},
        {"metric": None},
    ):
        path.write_text(json.dumps({**good, **change}))
        with pytest.raises(CheckpointError, match=r"index\.json"):
            load_model(tmp_path / "run")
    path.write_text(json.dumps({**good, "scores": {"x": {"bleu": None, "nll": "a"}, "y": 3}}))
    assert read_index(tmp_path / "run").scores == {"x": {}}


@pytest.mark.parametrize("change", ["lacks", "adds", "shape", "integers"])
def test_tensors_must_fit_exactly(tmp_path: Path, tokenizer: Tokenizer, change: str) -> None:
    """X04: a tensor without a place was left out silently, a missing one stayed at random."""
    path = save(tmp_path, 1, tokenizer)
    file = path / "model.safetensors"
    tensors = load_file(file)
    name = "encoder.layers.0.fc1.bias"
    if change == "lacks":
        del tensors[name]
    elif change == "adds":
        name = "decoder.output_bias"
        tensors[name] = torch.zeros(3)
    else:
        tensors[name] = (
            torch.zeros(16, dtype=torch.int64) if change == "integers" else tensors[name][1:]
        )
    save_file(tensors, file)
    rewrite_meta(path)
    with pytest.raises(CheckpointError, match=name):
        load_model(path)


# ---- averaging --------------------------------------------------------------------------------


def test_average_of_one_model_is_that_model(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """R15: a tensor reachable under two names was added up twice. Three times the same tied model
    gives its very bits, still tied when saved and loaded."""
    path = save(tmp_path, 1, tokenizer)
    mean = average_checkpoints([path] * 3)
    model = model_of(tokenizer, tokenizer)
    wanted = dict(model.named_parameters())
    assert mean.keys() == wanted.keys()
    assert all(torch.equal(mean[name], wanted[name]) for name in wanted)
    both = (tokenizer, tokenizer)
    saved = save_checkpoint(
        tmp_path, 1, model_of(tokenizer, tokenizer, seed=5), META, both, None,
        name="average", weights=mean,
    )  # fmt: skip
    loaded = load_model(saved).model
    assert loaded.lm_head.weight is loaded.encoder.embed_tokens.weight
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_average_is_the_arithmetic_mean(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """R15: sums in the precision of the files lose digits with every checkpoint added."""
    paths = [save(tmp_path, step, tokenizer, seed=step) for step in range(1, 6)]
    mean = average_checkpoints(paths)
    models = [dict(load_model(path).model.named_parameters()) for path in paths]
    for name, tensor in mean.items():
        exact = torch.stack([model[name].detach().double() for model in models]).mean(0)
        assert tensor.dtype == torch.float32
        assert (
            torch.equal(tensor, exact.float())
            or ((tensor - exact).abs() <= torch.finfo(torch.float32).eps * exact.abs()).all()
        )


def test_average_of_unlike_models_is_refused(
    tmp_path: Path, tokenizer: Tokenizer, other: Tokenizer
) -> None:
    """R15: models of different vocabularies, sizes or norms were averaged into noise."""
    path = save(tmp_path / "a", 1, tokenizer)
    unlike = [
        save(tmp_path / "b", 1, other),
        save(tmp_path / "c", 1, tokenizer, norm="pre"),
        save(tmp_path / "d", 1, tokenizer, positions="learned", max_positions=9),
    ]
    for one in unlike:
        for pair in ([path, one], [one, path]):
            with pytest.raises(CheckpointError):
                average_checkpoints(pair)
    nine = unlike[-1]
    ten = save(tmp_path / "e", 1, tokenizer, positions="learned", max_positions=10)
    with pytest.raises(CheckpointError, match="shape"):
        average_checkpoints([nine, ten])
    with (path / "model.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(CheckpointError, match="damaged"):
        average_checkpoints([path])
