"""The model card of an exported model: README.md with YAML front matter, as model hubs read it.

It is filled from the checkpoint's meta.json and from the log and the settings of the run that the
checkpoint lies in, and says only what stands there: a part about which nothing is known is left
out. Files are called by their name, without the folders of the machine where they were. The licence
is the one thing that nobody but the user can know, and stands as a place to fill in.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from mttrain.checkpoint import ModelBundle
from mttrain.config import load_config
from mttrain.errors import MttrainError
from mttrain.exporting import run_directory
from mttrain.hfcheck import TARGET_FOLDER
from mttrain.metrics import METRICS
from mttrain.rundir import LOG
from mttrain.runlog import read_log
from mttrain.tags import meta_tags, tag_token
from mttrain.yamlio import dump_yaml

LICENCE = "FILL IN: under which licence may others use the model, and the data it was trained on?"
_NAMES = dict(zip(METRICS, ("BLEU", "chrF2", "TER"), strict=True))
_SECTIONS = ("tokenizer", "model", "optim", "train")  # settings that tell nothing of the machine
Table = list[Sequence[object]]


@dataclass
class _Run:
    """What the run directory of a checkpoint tells; empty for a checkpoint that stands alone."""

    records: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record.get("kind") == kind]

    def last(self, kind: str, **fields: object) -> dict[str, Any]:
        """The last record of a kind that has these values; {} if there is none."""
        found = [r for r in self.of_kind(kind) if all(r.get(k) == v for k, v in fields.items())]
        return found[-1] if found else {}


def model_card(
    bundle: ModelBundle,
    name: str,
    class_name: str,
    remarks: Sequence[str] = (),
    *,
    separate: bool,
    longest: int,
) -> str:
    """The text of README.md for an export that is called `name`.

    class_name: of transformers' model; remarks: sentences on using it; separate: there is a
    tokenizer for each side; longest: tokens of a source that the tokenizer keeps, EOS included.
    """
    run = _read_run(bundle)
    tests = list(_tests(bundle, run))
    langs = [bundle.meta.get(f"{side}_lang") for side in ("source", "target")]
    known = [lang for lang in langs if isinstance(lang, str)]
    direction = " to ".join(known) if len(known) == 2 else ""
    parts = [
        f"---\n{dump_yaml(_front_matter(name, known, tests))}---",
        f"# {name}",
        _introduction(direction, class_name, run, bundle),
        _usage(name, separate, longest),
        _tag_usage(bundle),
        "\n".join(remarks),
        _section("Training data", _data(run)),
        _section("Scores", [*_validation(bundle, run), *(row for _, row in tests)], _SCORE_HEAD),
        _section("Training", _training(bundle, run)),
        _settings(run, bundle),
        f"## Licence\n\n{LICENCE}",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _read_run(bundle: ModelBundle) -> _Run:
    """Log and settings, as far as they are there and can be read."""
    run = _Run()
    folder = run_directory(str(bundle.path))
    if folder is None:
        return run
    try:
        run.records = read_log(folder / LOG)
    except MttrainError:
        run.records = []
    try:
        run.settings = load_config(folder / "config.yaml").model_dump(mode="json")
    except MttrainError:
        run.settings = {}
    return run


# ---- parts ------------------------------------------------------------------------------------

_SCORE_HEAD = ("text", "checkpoint", "beam", "metric", "value", "signature")


def _front_matter(name: str, langs: list[str], tests: list[tuple[Any, Any]]) -> dict[str, Any]:
    head: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "translation"}
    if langs:
        head["language"] = langs
    head["tags"] = ["translation", "mttrain"]
    metrics = [metric for metric, _ in tests if metric is not None]
    if metrics:
        task = {"type": "translation", "name": " ".join(["Translation", "-".join(langs)]).strip()}
        files = tests[0][1][0]
        result = {"task": task, "dataset": {"type": "test", "name": files}, "metrics": metrics}
        head["model-index"] = [{"name": name, "results": [result]}]
    return head


def _introduction(direction: str, class_name: str, run: _Run, bundle: ModelBundle) -> str:
    version = _text(bundle.meta.get("versions"), "mttrain")
    made = f"mttrain {version}".strip()
    what = f"A Transformer that translates {direction}, " if direction else "A Transformer, "
    return (
        f"{what}trained with {made} and written as a `{class_name}` for transformers. When it was "
        "written, transformers gave the same ids, the same logits but for rounding, and the same "
        "greedy translations as mttrain."
    )


def _usage(name: str, separate: bool, longest: int) -> str:
    path = json.dumps(name, ensure_ascii=False)
    decoder = "target_tokenizer" if separate else "tokenizer"
    other = ""
    if separate:
        other = (
            "target_tokenizer = AutoTokenizer.from_pretrained"
            f'({path}, subfolder="{TARGET_FOLDER}")\n'
        )
    return f"""## Use

```python
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({path})
{other}model = AutoModelForSeq2SeqLM.from_pretrained({path})
sentences = ["One sentence.", "Another one."]
batch = tokenizer(sentences, return_tensors="pt", padding=True, truncation=True)
output = model.generate(**batch)
for text in {decoder}.batch_decode(output, skip_special_tokens=True):
    print(text)
```

Give it one sentence at a time, and no blank ones. Input beyond {longest} tokens is cut; without
`truncation=True` it is an error."""


def _tag_usage(bundle: ModelBundle) -> str:
    """How to put a tag before the sources, for a model that was trained with some."""
    known = meta_tags(bundle.meta, bundle.path)
    if not known:
        return ""
    tokens = ", ".join(f"`{tag_token(name)}`" for name in known)
    must = "can" if bundle.meta.get("untagged", True) else "must"
    return f"""A tag {must} stand before each source; it says which language or kind of text is
wanted: {tokens}. The tokenizer takes such a text apart, so put its id there yourself, before
`generate`:

```python
import torch

tag = tokenizer.convert_tokens_to_ids("{tag_token(next(iter(known)))}")
for key, first in (("input_ids", tag), ("attention_mask", 1)):
    rows = batch[key]
    batch[key] = torch.cat([torch.full_like(rows[:, :1], first), rows], dim=1)
```"""


def _data(run: _Run) -> Table:
    """Rows (split, files, pairs, pairs used): from the report on the corpus, or the settings."""
    rows: Table = []
    splits = run.last("corpus").get("splits")
    for split in splits if isinstance(splits, list) else []:
        if isinstance(split, dict):
            pairs, kept = split.get("pairs"), split.get("kept")
            rows.append((split.get("split"), _files(split.get("files")), pairs, kept))
    return [("split", "files", "pairs", "pairs used"), *rows] if rows else []


def _validation(bundle: ModelBundle, run: _Run) -> Iterator[Sequence[object]]:
    """Rows of the scores that the checkpoint was saved with."""
    scores = bundle.meta.get("scores")
    if not isinstance(scores, dict):
        return
    record = run.last("valid", step=bundle.meta["step"])
    beam: object = record.get("beam")
    if _candidate(bundle, run):
        beam = run.last("candidates").get("beam")
    signatures = record.get("signatures") or run.last("valid").get("signatures") or []
    known = dict(zip(("bleu", "chrf"), signatures, strict=False))
    for metric, value in scores.items():
        if metric in _NAMES and _is_number(value):
            text = f"{value:.2f}"
            signature = known.get(metric, "")
            yield "validation", bundle.path.name, beam, _NAMES[metric], text, signature


def _candidate(bundle: ModelBundle, run: _Run) -> dict[str, Any]:
    """What the end of the run logged of this very checkpoint, if it was made there."""
    found = run.last("candidates").get("candidates")
    for candidate in found if isinstance(found, list) else []:
        if isinstance(candidate, dict) and candidate.get("name") == bundle.path.name:
            return {} if bundle.path.name.startswith("step-") else candidate
    return {}


def _tests(
    bundle: ModelBundle, run: _Run
) -> Iterator[tuple[dict[str, Any] | None, Sequence[object]]]:
    """The test scores of this very checkpoint: as an entry of the front matter, and as a row."""
    record = run.last("test", checkpoint=bundle.path.name)
    scores = record.get("scores")
    for score in scores if isinstance(scores, list) else []:
        if not isinstance(score, dict) or not _is_number(score.get("value")):
            continue
        metric = str(score.get("name")).lower()
        name, value = _NAMES.get(metric, metric), round(float(score["value"]), 2)
        row = (_test_name(run), bundle.path.name, record.get("beam"), name, f"{value:.2f}")
        entry = {"type": metric, "name": name, "value": value, "args": score.get("signature")}
        yield entry, (*row, score.get("signature"))


def _test_name(run: _Run) -> str:
    splits = run.last("corpus").get("splits")
    for split in splits if isinstance(splits, list) else []:
        if isinstance(split, dict) and split.get("split") == "test":
            return f"test ({_files(split.get('files'))})"
    return "test"


def _training(bundle: ModelBundle, run: _Run) -> Table:
    """Rows (what, value)."""
    step = bundle.meta["step"]
    done = [r for r in run.of_kind("train") if isinstance(r.get("step"), int) and r["step"] <= step]
    last: dict[str, Any] = done[-1] if done else {}
    begin, versions = run.last("begin"), bundle.meta.get("versions")
    members = _candidate(bundle, run).get("checkpoints")
    averaged = members if isinstance(members, list) and len(members) > 1 else None
    rows = [
        ("checkpoint", bundle.path.name),
        ("mean of the checkpoints", _joined(averaged)),
        ("updates", step),
        ("epoch, counted from 0", last.get("epoch")),
        ("time of training", _duration(last.get("seconds"))),
        ("parameters", bundle.model.parameter_count()),
        ("device", begin.get("device")),
        ("processes", begin.get("ranks")),
        *((f"version of {name}", _text(versions, name)) for name in ("mttrain", "torch", "python")),
    ]
    return [("", ""), *(row for row in rows if row[1] not in (None, ""))]


def _settings(run: _Run, bundle: ModelBundle) -> str:
    """The settings as YAML, without what belongs to the machine."""
    shown: dict[str, Any] = {}
    for name in _SECTIONS:
        section = run.settings.get(name)
        if name == "model" and not section:
            section = bundle.model.config.model_dump(mode="json")
        if isinstance(section, dict):
            shown[name] = {k: v for k, v in section.items() if not _is_local(k, v)}
    return f"## Settings\n\n```yaml\n{dump_yaml(shown)}```"


def _is_local(key: str, value: object) -> bool:
    """Whether a setting tells of the machine: its device, or where a file lies."""
    return key == "device" or key.endswith("path") or (isinstance(value, str) and "/" in value)


# ---- words ------------------------------------------------------------------------------------


def _section(title: str, rows: Table, head: Sequence[object] = ()) -> str:
    """A heading and a table, whose first row is its head; nothing without rows."""
    table = [head, *rows] if head and rows else rows
    if not table:
        return ""
    lines = ["| " + " | ".join(map(_cell, row)) + " |" for row in table]
    lines.insert(1, "|" + " --- |" * len(table[0]))
    return f"## {title}\n\n" + "\n".join(lines)


def _cell(value: object) -> str:
    """One cell: no line end and no bar may leave it."""
    text = "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
    return " ".join(text.replace("|", "\\|").split())


def _files(groups: object) -> str:
    """[["/a/train.en", "/a/train.de"], ...] -> "train.en, train.de; ..." """
    if not isinstance(groups, list):
        return ""
    return "; ".join(
        ", ".join(Path(str(name)).name for name in (g if isinstance(g, list) else [g]))
        for g in groups
    )


def _joined(names: object) -> str:
    return ", ".join(map(str, names)) if isinstance(names, list) else ""


def _text(content: object, name: str) -> str:
    value = content.get(name) if isinstance(content, dict) else None
    return value if isinstance(value, str) else ""


def _duration(seconds: object) -> str:
    """3725 -> "1 h 2 min 5 s"; nothing for what is no number."""
    if not _is_number(seconds):
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = ((hours, "h"), (minutes, "min"), (rest, "s"))
    return " ".join(f"{value} {unit}" for value, unit in parts if value) or "0 s"


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
