"""Training through its front door: learning, exactness, resuming, limits."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mttrain import distributed
from mttrain.checkpoint import checkpoint_names, load_model, newest_good, read_index
from mttrain.config import RunConfig
from mttrain.corpus import read_lines
from mttrain.dataset import TranslationDataset, collate, encode_corpus, epoch_plan
from mttrain.errors import CheckpointError, ConfigError, DataError, TrainingError
from mttrain.model import Transformer
from mttrain.optim import learning_rate
from mttrain.runlog import read_log
from mttrain.runsetup import make_run_dir, training_lines
from mttrain.tokenizer import Tokenizer, train_tokenizer
from mttrain.trainer import TrainResult, train
from mttrain.translator import TranslateOptions, Translator
from tests.integration.training_help import random_sentences, tiny_config, write_pairs
from tests.system.compare_help import CLOCK


def copy_data(folder: Path, count: int = 60) -> dict[str, Any]:
    lines = random_sentences(count, seed=3)
    valid = random_sentences(10, seed=4)
    return {
        "train": write_pairs(folder, "train", [(line, line) for line in lines]),
        "valid": write_pairs(folder, "valid", [(line, line) for line in valid]),
    }


def weights(run_dir: str | Path, step: int) -> dict[str, torch.Tensor]:
    model = load_model(Path(run_dir) / "checkpoints" / f"step-{step:08d}").model
    return dict(model.named_parameters())


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def records(run_dir: str | Path, kind: str) -> list[dict[str, Any]]:
    """Records without the fields that a clock makes."""
    return [
        {key: value for key, value in record.items() if key not in CLOCK}
        for record in read_log(Path(run_dir) / "log.jsonl")
        if record["kind"] == kind
    ]


# ---- learning ----------------------------------------------------------------------------------


def learned(folder: Path, pairs: list[tuple[str, str]], **sections: dict[str, Any]) -> list[str]:
    """Train on the pairs, with the first 20 as validation, and translate those."""
    data = {
        "train": write_pairs(folder, "train", pairs),
        "valid": write_pairs(folder, "valid", pairs[:20]),
    }
    config = tiny_config(folder, data, **sections)
    result = train(config)
    translator = Translator.load(result.run_dir)
    return translator.translate([source for source, _ in pairs[:20]], TranslateOptions(beam=1))


def test_twenty_pairs_are_overfitted_to_exact_output(tmp_path: Path) -> None:
    """A model that cannot learn twenty pairs by heart has a broken mask, loss or decoder."""
    sources = list(dict.fromkeys(random_sentences(40, seed=1, shortest=3)))[:20]
    targets = random_sentences(20, seed=2, shortest=3)
    outputs = learned(
        tmp_path,
        list(zip(sources, targets, strict=True)),
        model={"d_model": 64, "dropout": 0.0},
        optim={"lr": 5e-3, "warmup_steps": 20, "label_smoothing": 0.0},
        train={"max_steps": 250, "valid_every": 250, "batch_tokens": 1000},
    )
    assert outputs == targets


@pytest.mark.parametrize("task", ["copy", "reverse"])
def test_copy_and_reversal_are_learned(tmp_path: Path, task: str) -> None:
    """Unseen sequences under a new seed each time: the model must use positions and
    cross-attention, not its memory, and not one lucky start."""
    seed = secrets.randbelow(2**31)
    lines = list(dict.fromkeys(random_sentences(2500, seed, shortest=2, longest=5, words=20)))
    turn = (lambda text: " ".join(reversed(text.split()))) if task == "reverse" else str
    pairs = [(line, turn(line)) for line in lines]
    data = {
        "train": write_pairs(tmp_path, "train", pairs[60:]),
        "valid": write_pairs(tmp_path, "valid", pairs[:60]),
    }
    config = tiny_config(
        tmp_path,
        data,
        tokenizer={"vocab_size": 320},  # every word one token
        model={"d_model": 64, "d_ff": 128, "dropout": 0.0, "encoder_layers": 2},
        optim={"lr": 3e-3, "warmup_steps": 100, "label_smoothing": 0.0, "schedule": "linear"},
        train={"max_steps": 700, "valid_every": 350, "batch_tokens": 800, "log_every": 50},
    ).model_copy(update={"seed": seed})
    result = train(config)
    last = records(result.run_dir, "valid")[-1]
    # Who knows the words but not their order has a perplexity of exp((ln 2! + ln 3! + ln 4! +
    # ln 5!) / 18 tokens) = 1.79; some seeds are at 1.05 when the updates end, the most below 1.02.
    # One wrong word of 60 lines costs two points of BLEU.
    assert last["perplexity"] < 1.2 and last["bleu"] > 80, f"seed {seed}"


# ---- exactness ---------------------------------------------------------------------------------


def trained(folder: Path, data: dict[str, Any], **sections: dict[str, Any]) -> TrainResult:
    return train(tiny_config(folder, data, **sections))


def test_same_seed_same_run_other_seed_another(tmp_path: Path) -> None:
    """R19: some generator left unseeded; and seed 0 must not mean "unset"."""
    data = copy_data(tmp_path)
    runs = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        config = tiny_config(tmp_path / name, data).model_copy(update={"seed": seed})
        torch.rand(7)  # whatever the global generator did before must not matter
        runs[name] = train(config).run_dir
    assert same(weights(runs["a"], 12), weights(runs["b"], 12))
    assert records(runs["a"], "train") == records(runs["b"], "train")
    assert not same(weights(runs["a"], 12), weights(runs["c"], 12))


def test_accumulation_averages_tokens_not_batches(tmp_path: Path) -> None:
    """M09: one batch of all pairs against groups of small, uneven batches of the same pairs."""
    lines = random_sentences(12, seed=8, longest=30)
    data = {
        "train": write_pairs(tmp_path, "train", [(line, line) for line in lines]),
        "valid": write_pairs(tmp_path, "valid", [(line, line) for line in lines[:3]]),
    }
    common = {"model": {"dropout": 0.0}, "optim": {"label_smoothing": 0.1}}
    train_settings = {"max_steps": 1, "valid_every": 1, "batch_tokens": None}
    whole = trained(tmp_path / "whole", data, train={**train_settings, "batch_size": 12}, **common)
    parts = trained(
        tmp_path / "parts", data, train={**train_settings, "batch_size": 2, "accumulate": 6},
        **common,
    )  # fmt: skip
    first, second = (records(run.run_dir, "train")[0] for run in (whole, parts))
    for key in ("loss", "nll", "grad_norm"):
        assert first[key] == pytest.approx(second[key], rel=1e-5)
    assert first["target_tokens"] == second["target_tokens"]


def test_uneven_groups_against_a_loop_by_hand(tmp_path: Path) -> None:
    """M09, M10: weights after two epochs of seven batches in groups of four, with smoothing,
    against the plain loop: sum of the losses of a group over its tokens, then AdamW."""
    data = copy_data(tmp_path, count=14)
    config = tiny_config(
        tmp_path,
        data,
        model={"dropout": 0.0},
        # Adam makes full steps of gradients that are mere rounding; a large eps does not.
        optim={"eps": 1e-3},
        train={"batch_tokens": None, "batch_size": 2, "accumulate": 4, "max_steps": None,
               "max_epochs": 2, "valid_every": 100},
    )  # fmt: skip
    run = train(config)
    trained_weights = weights(run.run_dir, 4)
    bundle = load_model(run.run_dir)
    tokenizers = (bundle.source_tokenizer, bundle.target_tokenizer)
    dataset = TranslationDataset(
        encode_corpus(config.data, tokenizers, "train", tmp_path / "store")
    )
    torch.manual_seed(config.seed)
    model = Transformer(config.model, tokenizers[0].size, tokenizers[1].size)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), eps=1e-3, weight_decay=0.0)
    update = 0
    for epoch in range(2):
        plan = epoch_plan(config, dataset, epoch)
        for start in (0, 4):
            update += 1
            batches = [
                collate([dataset[int(i)] for i in plan.batch(position)])
                for position in range(start, min(start + 4, len(plan)))
            ]
            losses = [
                F.cross_entropy(
                    model.project(model(b.source, b.target_in)).flatten(0, 1),
                    b.target_out.flatten(),
                    ignore_index=0,
                    label_smoothing=0.1,
                    reduction="sum",
                )
                for b in batches
            ]
            optimizer.zero_grad()
            (sum(losses) / sum(b.target_tokens for b in batches)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.param_groups[0]["lr"] = learning_rate(update, config.optim, None)
            optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(trained_weights[name], parameter.detach(), rtol=0, atol=1e-5)


def test_leftover_group_is_an_update_of_its_own(tmp_path: Path) -> None:
    """M10, D06: seven batches in groups of four make two updates an epoch, and no pair is lost."""
    data = copy_data(tmp_path, count=14)
    run = trained(
        tmp_path, data,
        train={"batch_tokens": None, "batch_size": 2, "accumulate": 4, "max_steps": None,
               "max_epochs": 2, "valid_every": 100},
    )  # fmt: skip
    updates = records(run.run_dir, "train")
    assert [u["epoch"] for u in updates] == [0, 0, 1, 1]
    epochs = records(run.run_dir, "epoch")
    assert [e["batches"] for e in epochs] == [7, 7]
    tokens = [u["target_tokens"] for u in updates]
    assert tokens[0] + tokens[1] == tokens[2] + tokens[3] == epochs[0]["target_tokens"]


def test_corpus_smaller_than_a_group_still_trains(tmp_path: Path) -> None:
    """D06: three pairs with accumulate 8 are one update an epoch, not none."""
    run = trained(
        tmp_path, copy_data(tmp_path, count=3),
        train={"accumulate": 8, "max_steps": None, "max_epochs": 2, "valid_every": 100},
    )  # fmt: skip
    assert len(records(run.run_dir, "train")) == 2


def test_schedule_counts_updates(tmp_path: Path) -> None:
    """R03: with accumulation the schedule must not run accumulate times too fast."""
    run = trained(
        tmp_path, copy_data(tmp_path),
        optim={"lr": 1e-3, "warmup_steps": 10}, train={"accumulate": 4, "max_steps": 10},
    )  # fmt: skip
    rates = [record["lr"] for record in records(run.run_dir, "train")]
    assert rates == pytest.approx([1e-4 * step for step in range(1, 11)])


@pytest.mark.parametrize("size", [1, 3, 100])
def test_validation_loss_does_not_depend_on_batches(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M08, D06: loss and perplexity per real token, all pairs counted, whatever the batches."""
    import mttrain.validation as validation

    results = []
    for name, tokens in (("reference", 10_000), ("other", 8 * size)):
        monkeypatch.setattr(validation, "VALID_BATCH_TOKENS", tokens)
        run = trained(tmp_path / name, copy_data(tmp_path), train={"max_steps": 2})
        results.append(records(run.run_dir, "valid")[-1])
    assert results[0]["target_tokens"] == results[1]["target_tokens"]
    assert results[0]["nll"] == pytest.approx(results[1]["nll"], rel=1e-6)


# ---- resuming ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [4, 6, 7])
def test_resumed_run_equals_the_uninterrupted_one(tmp_path: Path, stop: int) -> None:
    """D08, R02, R14, R26: data order, schedule, optimiser, dropout and log go on to the bit."""
    data = copy_data(tmp_path)
    whole = trained(tmp_path / "whole", data)
    config = tiny_config(tmp_path / "cut", data)
    part = config.model_copy(update={"train": config.train.model_copy(update={"max_steps": stop})})
    train(part)
    resumed = train(config)
    assert same(weights(whole.run_dir, 12), weights(resumed.run_dir, 12))
    assert records(whole.run_dir, "train") == records(resumed.run_dir, "train")
    assert records(whole.run_dir, "epoch") == records(resumed.run_dir, "epoch")


def test_loader_workers_change_nothing(tmp_path: Path) -> None:
    """D10: every worker must not read everything, nor bring another order."""
    data = copy_data(tmp_path)
    plain = trained(tmp_path / "plain", data)
    workers = trained(tmp_path / "workers", {**data, "workers": 2})
    assert same(weights(plain.run_dir, 12), weights(workers.run_dir, 12))


def test_finished_run_says_so_and_touches_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """R22: a finished run that is started again must not write a duplicate checkpoint."""
    config = tiny_config(tmp_path, copy_data(tmp_path))
    first = train(config)
    before = snapshot(first.run_dir)
    capsys.readouterr()
    again = train(config)
    assert "is finished" in capsys.readouterr().err
    assert again.reason == "max_steps" and again.exit_code == 0
    assert snapshot(first.run_dir) == before


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_structural_change_is_refused_and_allowed_change_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """R16, R13: changed keys must be neither ignored nor mixed into an older run."""
    data = copy_data(tmp_path)
    train(tiny_config(tmp_path, data))
    with pytest.raises(ConfigError, match=r"model\.d_model: 32 -> 64"):
        train(tiny_config(tmp_path, data, model={"d_model": 64}))
    capsys.readouterr()
    train(tiny_config(tmp_path, data, train={"max_steps": 14}))
    said = capsys.readouterr().err
    assert "train.max_steps: 12 -> 14" in said and "resuming after update 12" in said


def test_fresh_starts_again(tmp_path: Path) -> None:
    """--fresh removes the run and nothing else that lies in its directory."""
    config = tiny_config(tmp_path, copy_data(tmp_path))
    result = train(config)
    note = result.run_dir / "notes.txt"
    note.write_text("mine")
    cached, export = (
        result.run_dir / "exports" / name for name in ("ctranslate2-float32-0123", "mine")
    )
    for folder in (cached, export):
        folder.mkdir(parents=True)
    train(config, fresh=True)
    assert note.read_text() == "mine" and export.exists() and not cached.exists()
    assert len(records(result.run_dir, "begin")) == 1


def test_fresh_spares_what_is_not_ours(tmp_path: Path) -> None:
    """A folder with somebody's own config.yaml and data/ was once taken for a run and emptied."""
    folder = tmp_path / "exp"
    data = copy_data(folder / "data")
    (folder / "config.yaml").write_text("# my own settings\nrun_dir: exp\n")
    config = tiny_config(tmp_path, data).model_copy(update={"run_dir": str(folder)})
    for fresh in (False, True):
        with pytest.raises(ConfigError, match="not empty"):
            train(config, fresh=fresh)
    (folder / "config.yaml").unlink()
    inside = tiny_config(tmp_path, data).model_copy(update={"run_dir": str(tmp_path / "run")})
    train(inside)
    mine = tmp_path / "run" / "data" / "train-notes.txt"
    mine.write_text("mine")
    train(inside, fresh=True)
    assert mine.read_text() == "mine" and Path(data["train"]["source"]).exists()


def test_second_training_in_one_directory_is_refused(tmp_path: Path) -> None:
    """Two processes in one run directory would remove each other's files; the lock names one."""
    config = tiny_config(tmp_path, copy_data(tmp_path))
    message = rf"in use by another training \(process {os.getpid()}"
    with make_run_dir(config, fresh=False), pytest.raises(ConfigError, match=message):
        train(config)
    train(config)


def test_run_on_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Some cluster file systems know no flock: "cannot write there" was said of a good one."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    train(tiny_config(tmp_path, copy_data(tmp_path)))
    assert capsys.readouterr().err.count("on a file system without locks") == 1


def test_changes_of_a_finished_run_are_named_and_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """R16, R22: a changed key that has no effect must not be taken in silence."""
    data = copy_data(tmp_path)
    first = train(tiny_config(tmp_path, data))
    before = snapshot(first.run_dir)
    capsys.readouterr()
    train(tiny_config(tmp_path, data, decode={"beam": 4}))
    assert "no effect on a finished run: decode.beam: 2 -> 4" in capsys.readouterr().err
    assert snapshot(first.run_dir) == before


def test_a_start_that_failed_stands_in_nobodys_way(tmp_path: Path) -> None:
    """The vocabulary of a text with lines missing was kept in silence when the text was corrected;
    other settings were refused, in a dry run too, though there was nothing to go on with."""
    data = copy_data(tmp_path)
    target = Path(data["train"]["target"])
    whole = target.read_text()
    target.write_text("".join(whole.splitlines(keepends=True)[:40]))
    with pytest.raises(DataError, match="lines"):
        train(tiny_config(tmp_path, data))
    target.write_text(whole)
    train(other := tiny_config(tmp_path, data, model={"d_model": 64}), dry_run=True)
    run_dir = train(other).run_dir
    learned = train_tokenizer(training_lines(other, ("source", "target")), vocab_size=330)
    assert Tokenizer.load(run_dir / "tokenizer.json").hash == learned.hash


def test_log_of_a_run_that_died_before_its_first_checkpoint(tmp_path: Path) -> None:
    """R26: what such a run logged must not stand beside the records of the next start."""
    config = tiny_config(tmp_path, copy_data(tmp_path))
    run_dir = train(config).run_dir
    shutil.rmtree(run_dir / "checkpoints")
    lines = (run_dir / "log.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["kind"] != "end"]
    (run_dir / "log.jsonl").write_text("".join(kept))
    train(config)
    assert [r["step"] for r in records(run_dir, "train")] == list(range(1, 13))
    assert len(records(run_dir, "begin")) == len(records(run_dir, "corpus")) == 1


def test_replaced_tokenizer_is_refused_on_resume(tmp_path: Path) -> None:
    """R17: the same size in another order would train on permuted ids, fluently and wrongly."""
    data = copy_data(tmp_path)
    run_dir = train(tiny_config(tmp_path, data)).run_dir
    other = train_tokenizer(random_sentences(200, seed=99), vocab_size=330)
    other.save(run_dir / "tokenizer.json")
    with pytest.raises(CheckpointError, match="tokenizer"):
        train(tiny_config(tmp_path, data, train={"max_steps": 14}))


def test_damaged_newest_checkpoint_and_a_signal(tmp_path: Path) -> None:
    """Falling back must not leave the damaged one as the newest: its successor was pruned."""
    data = copy_data(tmp_path)
    run_dir = train(tiny_config(tmp_path, data)).run_dir
    weights_file = run_dir / "checkpoints" / "step-00000012" / "model.safetensors"
    content = bytearray(weights_file.read_bytes())
    content[-1] ^= 1
    weights_file.write_bytes(content)
    short = tiny_config(tmp_path, data, train={"max_steps": 8, "valid_every": 100})
    (run_dir / "log.jsonl").write_text("")  # forget that the run was finished
    train(short)
    assert checkpoint_names(run_dir) == ["step-00000006", "step-00000008"]
    assert newest_good(run_dir) == run_dir / "checkpoints" / "step-00000008"


def test_foreign_directory_is_refused(tmp_path: Path) -> None:
    """R13: a directory with something else in it is never taken over."""
    config = tiny_config(tmp_path, copy_data(tmp_path))
    Path(config.run_dir).mkdir()
    (Path(config.run_dir) / "thesis.tex").write_text("precious")
    for fresh in (False, True):
        with pytest.raises(ConfigError, match="not empty"):
            train(config, fresh=fresh)
    assert (Path(config.run_dir) / "thesis.tex").read_text() == "precious"


@pytest.mark.parametrize("name", ["TORCHELASTIC_MAX_RESTARTS", "SLURM_RESTART_COUNT"])
def test_a_job_that_is_restarted_is_not_fresh_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """R13: each restart by torchrun, and each requeue by Slurm, emptied the run once more."""
    config = tiny_config(tmp_path, copy_data(tmp_path))
    train(config, fresh=True)
    monkeypatch.setenv(name, "3")
    with pytest.raises(ConfigError, match=rf"--fresh would empty the run again.*{name} is 3"):
        train(config, fresh=True)
    assert checkpoint_names(Path(config.run_dir)) == ["step-00000006", "step-00000012"]
    assert train(config, fresh=True, dry_run=True).reason == "dry_run"
    monkeypatch.setenv(name, "0")
    train(config, fresh=True)


def test_changed_text_is_refused(tmp_path: Path) -> None:
    """Other pairs under the same name would give another plan: no exact resuming."""
    data = copy_data(tmp_path)
    train(tiny_config(tmp_path, data))
    lines = random_sentences(60, seed=77)
    write_pairs(tmp_path, "train", [(line, line) for line in lines])
    with pytest.raises(CheckpointError, match=r"text has changed.*train\.src"):
        train(tiny_config(tmp_path, data, train={"max_steps": 14}))


# ---- limits, best, average ---------------------------------------------------------------------


def test_patience_stops_a_run_that_no_longer_improves(tmp_path: Path) -> None:
    """Early stopping counts validations without a better best."""
    run = trained(
        tmp_path, copy_data(tmp_path),
        optim={"lr": 1e-9}, train={"valid_every": 1, "patience": 3, "max_steps": 50},
    )  # fmt: skip
    assert run.reason == "patience"
    assert len(records(run.run_dir, "valid")) <= 6


def test_time_limit(tmp_path: Path) -> None:
    """max_time ends a run with a validation and a checkpoint like any other limit."""
    run = trained(tmp_path, copy_data(tmp_path), train={"max_steps": 100_000, "max_time": "1s"})
    assert run.reason == "max_time" and run.best is not None
    assert records(run.run_dir, "end")[0]["step"] == records(run.run_dir, "valid")[-1]["step"]


@pytest.mark.parametrize("metric", ["bleu", "chrf", "nll"])
def test_best_follows_the_direction_of_the_metric(tmp_path: Path, metric: str) -> None:
    """R06: for a loss the lowest wins, for BLEU and chrF the highest."""
    run = trained(
        tmp_path, copy_data(tmp_path),
        train={"valid_every": 2, "best_metric": metric, "max_steps": 12},
    )  # fmt: skip
    values = {r["step"]: r[metric] for r in records(run.run_dir, "valid")}
    choose = min if metric == "nll" else max
    best = choose(values, key=lambda step: values[step])
    assert values[int(run.best.removeprefix("step-"))] == values[best]
    assert read_index(run.run_dir).metric == metric


# Names of the candidates behind the best single checkpoint. With the last checkpoints the best ones
# too, "both" has one mean: training on 12 updates gets better each time.
ENDS = [
    ({"average": 3, "average_of": "last"}, ["average"]),
    ({"average": 3, "average_of": "best"}, ["average-best"]),
    ({"average": 3, "average_of": "both", "best_metric": "chrf"}, None),
    ({"average": 0, "ema": 0.5}, ["ema"]),
    ({"average": 3, "average_of": "last", "ema": 0.9}, ["average", "ema"]),
]


@pytest.mark.parametrize(("settings", "names"), ENDS, ids=str)
def test_the_best_candidate_is_kept(
    tmp_path: Path, settings: dict[str, Any], names: list[str] | None
) -> None:
    """A mean was once kept unseen: every candidate is scored with the decode settings, the index
    names the best, and only that one stays."""
    run = trained(
        tmp_path, copy_data(tmp_path),
        train={"valid_every": 2, "keep_last": 3, "best_metric": "nll", "max_steps": 12, **settings},
    )  # fmt: skip
    (record,) = records(run.run_dir, "candidates")
    found = {candidate["name"]: candidate for candidate in record["candidates"]}
    single, *others = found
    assert single == "step-00000012" or "best_metric" in settings
    if names is None:
        assert others[0] == "average" and len(others) <= 2
    else:
        assert others == names
    assert all(len(found[n]["checkpoints"]) == (0 if n == "ema" else 3) for n in others)
    metric = settings.get("best_metric", "nll")
    choose = min if metric == "nll" else max
    values = {name: candidate["scores"][metric] for name, candidate in found.items()}
    assert run.best == record["best"] == choose(values, key=lambda name: values[name])
    assert read_index(run.run_dir).best == run.best
    made = {path.name for path in (run.run_dir / "checkpoints").iterdir() if path.is_dir()}
    assert made & {"average", "average-best", "ema"} == {run.best} - {single}
    lines = random_sentences(10, seed=4)
    scores = Translator.load(run.run_dir).score(zip(lines, lines, strict=True))
    nll = -sum(score.sum for score in scores) / sum(score.tokens for score in scores)
    assert nll == pytest.approx(found[run.best]["scores"]["nll"], rel=1e-5)


def test_test_set_is_scored_once_at_the_end(tmp_path: Path) -> None:
    """The closing scores are those of the best checkpoint, with TER and signatures."""
    data = copy_data(tmp_path)
    run = trained(tmp_path, {**data, "test": data["valid"]})
    assert [score.name for score in run.scores] == ["BLEU", "chrF", "TER"]
    (record,) = records(run.run_dir, "test")
    assert record["checkpoint"] == run.best and record["beam"] == 2


def test_validation_score_is_what_translate_gives(tmp_path: Path) -> None:
    """E10: BLEU of the log against translating with the saved checkpoint and the same options."""
    from mttrain.corpus import read_lines
    from mttrain.metrics import score_corpus

    data = copy_data(tmp_path)
    run = trained(tmp_path, data, train={"valid_beam": 3, "max_steps": 40, "valid_every": 20})
    record = records(run.run_dir, "valid")[-1]
    translator = Translator.load(run.run_dir / "checkpoints" / f"step-{record['step']:08d}")
    sources = list(read_lines(data["valid"]["source"]))
    outputs = translator.translate(sources, TranslateOptions(beam=3, length_penalty=1.0))
    references = list(read_lines(data["valid"]["target"]))
    scores = score_corpus(outputs, [references], lang="yy", metrics=("bleu", "chrf"))
    assert record["bleu"] == pytest.approx(scores[0].value, abs=0.01)
    assert record["chrf"] == pytest.approx(scores[1].value, abs=0.01)
    assert record["signatures"] == [score.signature for score in scores]
    assert record["beam"] == 3 and record["length_penalty"] == 1.0


def test_embedding_has_the_size_of_the_learned_vocabulary(tmp_path: Path) -> None:
    """K05: 32,000 asked of a text that gives a few hundred: the model follows the tokenizer."""
    run = trained(
        tmp_path, copy_data(tmp_path), tokenizer={"vocab_size": 32000}, train={"max_steps": 2}
    )
    bundle = load_model(run.run_dir)
    size = bundle.source_tokenizer.size
    assert size < 1000 and bundle.model.encoder.embed_tokens.num_embeddings == size


def test_pair_above_the_budget_is_a_batch_of_its_own(tmp_path: Path) -> None:
    """D05: one sentence larger than batch_tokens must neither hang nor vanish."""
    run = trained(tmp_path, copy_data(tmp_path, count=5), train={"batch_tokens": 3, "max_steps": 5})
    assert records(run.run_dir, "epoch")[0]["batches"] == 5


def test_report_counts_what_is_left_out(tmp_path: Path) -> None:
    """T12, D01: blank and over-long pairs are skipped as pairs, with counts and line numbers."""
    pairs = [(line, line) for line in random_sentences(20, seed=3, shortest=2)]
    pairs[2], pairs[4], pairs[8] = ("", "ba"), ("ba", ""), ("", "")
    pairs[10] = ("ba " * 80, "ba")
    data = {
        "train": write_pairs(tmp_path, "train", pairs),
        "valid": write_pairs(tmp_path, "valid", pairs[12:16]),
    }
    run = trained(tmp_path, data, train={"max_steps": 2})
    corpus = records(run.run_dir, "corpus")[0]["splits"][0]
    assert corpus["skipped"] == {"blank": 3, "too_long": 1} and corpus["kept"] == 16
    encoded = records(run.run_dir, "encoded")[0]
    assert encoded["pairs"] == 16 and encoded["skipped"]["blank"]["count"] == 3


def test_precision_may_change_on_resume(tmp_path: Path) -> None:
    """A float32 run that goes on in float16 has no scale to load, which must not be an error."""
    data = copy_data(tmp_path)
    train(tiny_config(tmp_path, data))
    result = train(tiny_config(tmp_path, data, train={"max_steps": 14, "precision": "fp16"}))
    assert result.reason == "max_steps"


# ---- what goes wrong ---------------------------------------------------------------------------


def test_divergence_stops_the_run_and_spares_the_checkpoint(tmp_path: Path) -> None:
    """R01: NaN must be caught before the update, and never be saved or be the best."""
    data = copy_data(tmp_path)
    good = train(tiny_config(tmp_path, data))
    wild = tiny_config(
        tmp_path,
        data,
        optim={"lr": 1e30, "clip_norm": None, "schedule": "constant"},
        train={"max_steps": 100, "valid_every": 4},  # a validation among the bad updates
    )
    with pytest.raises(TrainingError, match="not finite"):
        train(wild)
    newest = newest_good(good.run_dir)
    assert newest is not None
    assert all(v.isfinite().all() for _, v in load_model(newest).model.named_parameters())
    index = read_index(good.run_dir)
    assert all(math.isfinite(s["nll"]) for s in index.scores.values() if "nll" in s)


def test_unequal_line_counts_are_refused_before_training(tmp_path: Path) -> None:
    """T10: both counts and both names, for training, validation and test pairs."""
    for split in ("train", "valid", "test"):
        folder = tmp_path / split
        data = copy_data(folder)
        data["test"] = dict(write_pairs(folder, "test", [("ba", "ba"), ("bi", "bi")]))
        target = Path(data[split]["target"])
        lines = target.read_text().splitlines(keepends=True)
        target.write_text("".join(lines[:-1]))
        with pytest.raises(DataError, match=rf"{len(lines)}.*{len(lines) - 1}") as caught:
            train(tiny_config(folder, data))
        assert str(target) in str(caught.value)
        assert not list(folder.glob("run/checkpoints/*"))


def test_all_missing_files_are_named_at_once(tmp_path: Path) -> None:
    """A wrong path was found one at a time, after a vocabulary had been learned for minutes."""
    data = copy_data(tmp_path)
    data["valid"]["source"] = str(tmp_path / "nope.en")
    Path(data["valid"]["target"]).write_text("")
    data["test"] = {"source": str(tmp_path), "target": str(tmp_path / "nope.de")}
    with pytest.raises(DataError) as caught:
        train(tiny_config(tmp_path, data))
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "data.valid.source", "data.valid.target", "data.test.source", "data.test.target",
    ]  # fmt: skip
    assert "no such file" in lines[0] and "empty" in lines[1] and "directory" in lines[2]
    assert not Path(tmp_path / "run").exists()


def test_half_precision_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """M02: a few updates in bfloat16 and float16 have finite losses near those of float32, and not
    the same; bfloat16 is trained, and said to be, as float32 where it would be slower."""
    data = copy_data(tmp_path)
    losses = {}
    for name, fast in (("fp32", True), ("bf16", True), ("fp16", True), ("bf16", False)):
        monkeypatch.setattr(distributed, "bfloat16_is_fast", lambda fast=fast: fast)
        folder = tmp_path / f"{name}{fast}"
        run = trained(folder, data, train={"precision": name, "max_steps": 4})
        losses[name, fast] = [r["loss"] for r in records(run.run_dir, "train")]
        said = records(run.run_dir, "begin")[0]["cpu"]
        assert ("bf16 would be slower" in said) == (not fast)
    exact = losses.pop(("fp32", True))
    assert losses.pop(("bf16", False)) == exact
    for found in losses.values():
        assert found == pytest.approx(exact, rel=0.01) and found != exact


def test_a_given_vocabulary_of_characters_is_not_cut(tmp_path: Path) -> None:
    """With `tokenizer.path` the level is not known from the configuration, and BPE-dropout cut
    characters into bytes."""
    data = copy_data(tmp_path)
    path = tmp_path / "characters.json"
    train_tokenizer(random_sentences(60, seed=3), vocab_size=330, level="character").save(path)
    values = tiny_config(tmp_path, data).model_dump(mode="json")
    values["tokenizer"] = {"path": str(path), "dropout": 0.1}
    with pytest.raises(ConfigError, match=r"characters\.json: its tokens are characters"):
        train(RunConfig.model_validate(values, strict=False))


def test_validation_on_a_cpu_is_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The likelihood in the log was that of bfloat16 products, and not what `eval` gives for the
    checkpoint that it chose."""
    monkeypatch.setattr(distributed, "bfloat16_is_fast", lambda: True)
    data = copy_data(tmp_path)
    limits = {"precision": "bf16", "max_steps": 4, "valid_every": 4, "average": 0}
    run = trained(tmp_path, data, train=limits)
    sides = [read_lines(data["valid"][side]) for side in ("source", "target")]
    pairs = [(s, t) for s, t in zip(*sides, strict=True) if s.strip() and t.strip()]
    scores = Translator.load(run.run_dir, device="cpu").score(pairs)
    nll = -sum(score.sum for score in scores) / sum(score.tokens for score in scores)
    assert records(run.run_dir, "valid")[-1]["nll"] == pytest.approx(nll, rel=1e-6)


def test_log_is_valid_json_and_config_is_resolved(tmp_path: Path) -> None:
    """The run directory tells everything: each line of the log parses, the config loads equal."""
    from mttrain.config import load_config

    config: RunConfig = tiny_config(tmp_path, copy_data(tmp_path))
    run = train(config)
    for line in (run.run_dir / "log.jsonl").read_text().splitlines():
        json.loads(line)
    assert load_config(run.run_dir / "config.yaml") == config
    kinds = {record["kind"] for record in read_log(run.run_dir / "log.jsonl")}
    assert {"corpus", "begin", "epoch", "train", "valid", "best", "end"} <= kinds
    assert records(run.run_dir, "valid")[0]["samples"]
