"""The model card: what it says is what the run's own files say, and it says no more."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mttrain.checkpoint import load_model
from mttrain.modelcard import LICENCE, model_card
from mttrain.rundir import LOG
from mttrain.runlog import read_log
from mttrain.trainer import train
from tests.integration.training_help import random_sentences, tiny_config, write_pairs


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was really trained, with a test set."""
    folder = tmp_path_factory.mktemp("card")
    data: dict[str, Any] = {
        name: write_pairs(folder / "text", name, [(x, x) for x in random_sentences(count, seed)])
        for name, count, seed in (("train", 60, 1), ("valid", 9, 2), ("test", 7, 3))
    }
    config = tiny_config(folder, data)
    train(config)
    return Path(config.run_dir)


def card_of(model: Path, **changes: Any) -> str:
    values: dict[str, Any] = {"separate": False, "longest": 99, **changes}
    return model_card(load_model(model), "my-model", "MarianMTModel", **values)


def front_matter(card: str) -> dict[str, Any]:
    """As another program reads it."""
    found = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
    assert found is not None
    content = yaml.safe_load(found[1])
    assert isinstance(content, dict)
    return content


def rows(card: str, title: str) -> list[list[str]]:
    """The cells of a table, its head left out."""
    section = card.split(f"## {title}\n\n")[1].split("\n\n")[0]
    split = re.compile(r"(?<!\\)\|")
    return [[cell.strip() for cell in split.split(row)[1:-1]] for row in section.split("\n")[2:]]


def test_front_matter(run: Path) -> None:
    """The hub could not read the card, or showed a score that nobody had measured."""
    card = card_of(run)
    (record,) = (r for r in read_log(run / LOG) if r["kind"] == "test")
    head = front_matter(card)
    assert head["language"] == ["xx", "yy"] and head["pipeline_tag"] == "translation"
    assert head["library_name"] == "transformers"
    (model,) = head["model-index"]
    (result,) = model["results"]
    assert model["name"] == "my-model" and result["task"]["type"] == "translation"
    assert result["dataset"]["name"] == "test (test.src, test.tgt)"
    found = {metric["type"]: metric for metric in result["metrics"]}
    for score in record["scores"]:
        metric = found.pop(score["name"].lower())
        assert metric["value"] == round(score["value"], 2) and metric["args"] == score["signature"]
    assert not found


def test_the_hubs_own_reader_takes_it(run: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    results = hub.ModelCard(card_of(run)).data.eval_results
    assert {result.metric_type for result in results} == {"bleu", "chrf", "ter"}
    assert all(result.task_type == "translation" for result in results)


def test_says_what_the_log_says(run: Path) -> None:
    card = card_of(run)
    records = read_log(run / LOG)
    (best,) = {r["checkpoint"] for r in records if r["kind"] == "test"}
    step = int(best.removeprefix("step-"))
    assert rows(card, "Training data") == [
        ["training", "train.src, train.tgt", "60", "60"],
        ["validation", "valid.src, valid.tgt", "9", "9"],
        ["test", "test.src, test.tgt", "7", "7"],
    ]
    (valid,) = (r for r in records if r["kind"] == "valid" and r["step"] == step)
    (test,) = (r for r in records if r["kind"] == "test")
    scores = rows(card, "Scores")
    bar = [signature.replace("|", "\\|") for signature in valid["signatures"]]
    assert scores[:2] == [
        ["validation", best, "1", "BLEU", f"{valid['bleu']:.2f}", bar[0]],
        ["validation", best, "1", "chrF2", f"{valid['chrf']:.2f}", bar[1]],
    ]
    assert [row[4] for row in scores[2:]] == [f"{s['value']:.2f}" for s in test["scores"]]
    assert [row[2] for row in scores[2:]] == ["2", "2", "2"]
    facts = dict(rows(card, "Training"))
    begin = next(r for r in records if r["kind"] == "begin")
    assert facts["updates"] == str(step) and facts["checkpoint"] == best
    assert facts["parameters"] == f"{begin['parameters']:,}"
    settings = yaml.safe_load(card.split("```yaml\n")[1].split("```")[0])
    assert settings["model"]["d_model"] == 32 and settings["optim"]["warmup_steps"] == 5
    assert card.rstrip().endswith(LICENCE)


def test_tells_nothing_of_the_machine(run: Path) -> None:
    """The card published folders of the machine, and with them the name of its user."""
    assert str(run.parent) not in card_of(run)


def test_another_checkpoint_does_not_get_the_test_score(run: Path) -> None:
    """The score of the best checkpoint stood on the card of another one."""
    (best,) = {r["checkpoint"] for r in read_log(run / LOG) if r["kind"] == "test"}
    others = [p for p in (run / "checkpoints").glob("step-*") if p.name != best]
    assert others
    for other in others:
        card = card_of(other)
        assert "model-index" not in front_matter(card) and best not in card


def test_says_nothing_that_is_not_known(run: Path, tmp_path: Path) -> None:
    """A checkpoint without its run: empty tables, the word None, or made-up facts."""
    (checkpoint, *_) = (run / "checkpoints").glob("step-*")
    shutil.copytree(checkpoint, tmp_path / "alone")
    card = card_of(tmp_path / "alone")
    assert "Training data" not in card and "optim" not in card and "None" not in card
    facts = dict(rows(card, "Training"))
    assert "device" not in facts and "time of training" not in facts and "updates" in facts
    assert front_matter(card)["language"] == ["xx", "yy"]
    assert "d_model: 32" in card


@pytest.mark.parametrize(
    "damage", ["no json", '{"kind": "test", "scores": 5}', '{"kind": 3}', "[]"]
)
def test_a_damaged_log_does_not_stop_an_export(damage: str, run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / LOG).write_text(damage + "\n", encoding="utf-8")
    assert "Training data" not in card_of(tmp_path / "run")


def test_two_tokenizers(run: Path) -> None:
    card = card_of(run, separate=True)
    assert 'subfolder="target"' in card and "target_tokenizer.batch_decode" in card
    assert "target" not in card_of(run).split("## Use")[1].split("## ")[0]


def test_how_to_put_a_tag_before_a_source(run: Path) -> None:
    """Whoever loads the export elsewhere gets one language for all, or nonsense, without it; the
    lines must be code that puts it there, first in each row."""
    assert "A tag" not in card_of(run)
    bundle = load_model(run)
    meta = {**bundle.meta, "tags": {"2de": "de", "bt": None}, "untagged": False}
    card = model_card(replace(bundle, meta=meta), "m", "M", separate=False, longest=9)
    assert "A tag must stand" in card and "`<2de>`, `<bt>`" in card
    (lines,) = re.findall(r"```python\n(import torch.*?)```", card, re.DOTALL)

    class Tokens:
        def convert_tokens_to_ids(self, token: str) -> int:
            return {"<2de>": 4}[token]

    ids, mask = torch.tensor([[7, 8, 3], [9, 3, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    batch = {"input_ids": ids, "attention_mask": mask}
    exec(lines, {"tokenizer": Tokens(), "batch": batch})
    assert batch["input_ids"].tolist() == [[4, 7, 8, 3], [4, 9, 3, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    either = {**meta, "untagged": True}
    card = model_card(replace(bundle, meta=either), "m", "M", separate=False, longest=9)
    assert "A tag can stand" in card
