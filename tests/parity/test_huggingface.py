"""The export for Hugging Face, used as its users do: with AutoTokenizer and generate.

Logits and translations are computed here from the written directory alone, beside what the export
compares itself; the rest holds that its own comparison finds what it must find.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

from mttrain import hfcheck  # noqa: E402
from mttrain.checkpoint import Index, load_model, save_checkpoint, write_index  # noqa: E402
from mttrain.config import ModelConfig  # noqa: E402
from mttrain.errors import CheckpointError, ConfigError  # noqa: E402
from mttrain.exporting import MARKER, ExportReport  # noqa: E402
from mttrain.huggingface import export_huggingface, residual_order  # noqa: E402
from mttrain.model import Transformer  # noqa: E402
from mttrain.segments import padded  # noqa: E402
from mttrain.tokenizer import BOS_ID, EOS_ID, PAD_ID, Tokenizer, train_tokenizer  # noqa: E402
from mttrain.translator import TranslateOptions, Translator  # noqa: E402

ENGLISH = ["the", "small", "house", "dog", "runs"]
GERMAN = ["ein", "kleines", "Haus", "Hund", "läuft"]
LINES = [
    "the small house.", "dog", "ein Hund läuft the house runs", "</s>", " two  spaces ", "É 🤷🏽",
]  # fmt: skip
DECODE = {"beam": 3, "length_penalty": 0.6, "max_length": 14}
GREEDY = {"num_beams": 1, "early_stopping": False, "length_penalty": 1.0}
TOLERANCE = 1e-4


def small_tokenizer(words: list[str], size: int) -> Tokenizer:
    return train_tokenizer(
        [f"{a} {b} {c}." for a in words for b in words for c in words], vocab_size=size
    )


@pytest.fixture(scope="module")
def shared() -> tuple[Tokenizer, Tokenizer]:
    tokenizer = small_tokenizer(ENGLISH + GERMAN, 300)
    return tokenizer, tokenizer


@pytest.fixture(scope="module")
def separate() -> tuple[Tokenizer, Tokenizer]:
    return small_tokenizer(ENGLISH, 280), small_tokenizer(GERMAN, 290)


def random_model(tokenizers: tuple[Tokenizer, Tokenizer], **changes: Any) -> Transformer:
    """A model whose parameters are all random: biases and norms too, which else are 0 and 1."""
    sizes = {"d_model": 20, "d_ff": 36, "num_heads": 2, "encoder_layers": 2, "decoder_layers": 1}
    config = ModelConfig(**{**sizes, "dropout": 0.1, **changes})
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(5)
        model = Transformer(config, *(tokenizer.size for tokenizer in tokenizers)).eval()
        for name, value in model.named_parameters():
            value.add_(torch.randn_like(value) * (0.05 if "embed" in name else 0.2))
    return model


def trained_model(tokenizers: tuple[Tokenizer, Tokenizer], **changes: Any) -> Transformer:
    """A model that has half learned to put a word for a word, so that its translations end."""
    model = random_model(tokenizers, **{"d_model": 32, "d_ff": 64, **changes, "dropout": 0.0})
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    chooser = random.Random(1)
    cpu = torch.device("cpu")
    for _ in range(120):
        numbers = [chooser.choices(range(5), k=chooser.randint(1, 4)) for _ in range(24)]
        texts = [
            [" ".join(words[i] for i in row) for row in numbers] for words in (ENGLISH, GERMAN)
        ]
        source, target = (t.encode_batch(x) for t, x in zip(tokenizers, texts, strict=True))
        src = padded([[*ids, EOS_ID] for ids in source], cpu)
        begin = padded([[BOS_ID, *ids] for ids in target], cpu)
        out = padded([[*ids, EOS_ID] for ids in target], cpu)
        logits = model.project(model(src, begin)).transpose(1, 2)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits, out, ignore_index=PAD_ID).backward()
        optimizer.step()
    return model


def make_run(
    folder: Path, model: Transformer, tokenizers: tuple[Tokenizer, Tokenizer], **meta: Any
) -> Path:
    run = folder / "run"
    run.mkdir()
    known = {"source_lang": "en", "target_lang": "de", "max_length": 60, "decode": DECODE}
    path = save_checkpoint(run, 7, model, {**known, **meta}, tokenizers, None)
    write_index(run, Index().added(path.name, {"bleu": 1.0}))
    return run


def exported(
    folder: Path, tokenizers: tuple[Tokenizer, Tokenizer], **changes: Any
) -> tuple[Path, Path, ExportReport]:
    """(run, exported directory, report) of a new random model."""
    return exported_model(folder, random_model(tokenizers, **changes), tokenizers)


def exported_model(
    folder: Path, model: Transformer, tokenizers: tuple[Tokenizer, Tokenizer], **meta: Any
) -> tuple[Path, Path, ExportReport]:
    """The same of a given model."""
    run = make_run(folder, model, tokenizers, **meta)
    out = folder / "out"
    return run, out, export_huggingface(str(run), out, lines=LINES, replace=False)


def load(folder: Path) -> tuple[Any, Any]:
    """As a user does it."""
    return (
        transformers.AutoTokenizer.from_pretrained(folder),
        transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval(),
    )


def largest_difference(run: Path, out: Path) -> float:
    """Of the logits for random targets as long as positions allow, of sentences of all lengths."""
    bundle = load_model(run)
    tokenizer, theirs = load(out)
    limit = bundle.model.max_positions or 300
    long = ("the small house runs. " * limit)[: 3 * limit]
    largest = 0.0
    for lines, length in ((LINES, 9), ([*LINES, long], limit)):
        batch = tokenizer(lines, return_tensors="pt", padding=True, truncation=True)
        assert batch["input_ids"].shape[1] <= limit or bundle.model.max_positions is None
        generator = torch.Generator().manual_seed(length)
        vocab = bundle.target_tokenizer.size
        target = torch.randint(4, vocab, (len(lines), length), generator=generator)
        target[:, 0] = theirs.config.decoder_start_token_id
        with torch.no_grad():
            ours = bundle.model.project(bundle.model(batch["input_ids"], target))
            logits = theirs(**batch, decoder_input_ids=target).logits[..., :vocab]
        largest = max(largest, (ours - logits).abs().max().item())
    return largest


def generated(out: Path, lines: list[str], subfolder: str = "", **changes: Any) -> list[str]:
    tokenizer, model = load(out)
    target = transformers.AutoTokenizer.from_pretrained(out, subfolder=subfolder)
    batch = tokenizer(lines, return_tensors="pt", padding=True, truncation=True)
    return target.batch_decode(model.generate(**batch, **changes), skip_special_tokens=True)


def ours(run: Path, lines: list[str], **changes: Any) -> list[str]:
    translator = Translator.load(run, device="cpu", precision="fp32")
    return translator.translate(lines, TranslateOptions(**{**DECODE, **changes}))


SHARED = [
    {"norm": norm, "activation": activation, "tie": tie}
    for norm in ("post", "pre")
    for activation in ("relu", "gelu")
    for tie in ("all", "target", "none")
]
LEARNED = [
    {"norm": "pre", "positions": "learned", "max_positions": 48, "tie": tie}
    for tie in ("all", "none")
]
SEPARATE = [{"norm": norm, "tie": tie} for norm in ("post", "pre") for tie in ("target", "none")]
ODD = [{"norm": norm, "d_model": 15, "num_heads": 3} for norm in ("post", "pre")]
ODD += [
    {"norm": norm, "scale_embedding": False, "scale_attention": False} for norm in ("post", "pre")
]


def check(run: Path, out: Path, report: ExportReport, subfolder: str = "") -> None:
    assert largest_difference(run, out) <= TOLERANCE
    greedy = generated(out, LINES, subfolder, **GREEDY, min_new_tokens=5)
    assert greedy == ours(run, LINES, beam=1, min_length=5)
    assert any(greedy)
    assert report.lines == report.equal == len(LINES)
    assert report.largest_difference is not None and 0 < report.largest_difference <= TOLERANCE


@pytest.mark.parametrize("changes", [*SHARED, *LEARNED, *ODD], ids=str)
def test_one_vocabulary(
    changes: dict[str, Any], shared: tuple[Tokenizer, Tokenizer], tmp_path: Path
) -> None:
    """X01, X02, X03, X04: scale, activation, norm order, position columns and offset, tied
    matrices, a bias or a final norm left out."""
    check(*exported(tmp_path, shared, **changes))


@pytest.mark.parametrize("changes", SEPARATE, ids=str)
def test_a_vocabulary_for_each_side(
    changes: dict[str, Any], separate: tuple[Tokenizer, Tokenizer], tmp_path: Path
) -> None:
    """Case X02: the matrix of the wrong side, or ids that the target does not have."""
    run, out, report = exported(tmp_path, separate, **changes)
    check(run, out, report, "target")
    untied = changes["norm"] == "pre"  # a class whose older versions tie what they are not told to
    assert ("transformers 5 or newer" in (out / "README.md").read_text("utf-8")) == untied
    assert ("transformers 5 or newer" in report.text()) == untied
    target = transformers.AutoTokenizer.from_pretrained(out, subfolder="target")
    assert target("läuft Haus")["input_ids"] == [*separate[1].encode("läuft Haus"), EOS_ID]


@pytest.fixture(scope="module")
def half_trained(shared: tuple[Tokenizer, Tokenizer]) -> dict[str, Transformer]:
    return {norm: trained_model(shared, norm=norm) for norm in ("post", "pre")}


@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0, 2.0, -0.5])
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_the_search_of_the_run_is_the_default(
    norm: str,
    penalty: float,
    shared: tuple[Tokenizer, Tokenizer],
    half_trained: dict[str, Transformer],
    tmp_path: Path,
) -> None:
    """A length penalty of another meaning, or stopping early: other translations than mttrain's
    with the same beam."""
    decode = {"beam": 4, "length_penalty": penalty, "max_length": 40}
    run, out, _ = exported_model(tmp_path, half_trained[norm], shared, decode=decode)
    lines = [f"{a} {b} {c}" for a in ENGLISH[:3] for b in ENGLISH for c in GERMAN[:2]]
    wanted = ours(run, lines, **decode)
    assert len(set(wanted)) > 5 and len(max(wanted, key=len)) < 60
    assert generated(out, lines) == wanted


def test_never_produces_what_is_forbidden(
    shared: tuple[Tokenizer, Tokenizer], tmp_path: Path
) -> None:
    """Ids that are padding, unknown, BOS or hold a line end won by their probability."""
    forbidden = [0, 1, 2, *shared[1].newline_ids]
    model = random_model(shared, tie="none")
    with torch.no_grad():
        bias = model.decoder.layers[-1].final_layer_norm.bias  # type: ignore[union-attr]
        model.lm_head.weight[forbidden] += 9 * bias / bias.square().sum()  # type: ignore[operator]
    _, out, report = exported_model(tmp_path, model, shared)
    assert report.equal == len(LINES)
    tokenizer, theirs = load(out)
    ids = theirs.generate(**tokenizer(LINES, return_tensors="pt", padding=True))
    assert not {1, *shared[1].newline_ids} & set(ids[:, 1:].flatten().tolist())


def test_long_sources_are_cut_alike(shared: tuple[Tokenizer, Tokenizer], tmp_path: Path) -> None:
    """The end symbol fell off when a source was cut, or the position table was too short."""
    for number, changes in enumerate(({}, LEARNED[0])):
        folder = tmp_path / str(number)
        folder.mkdir()
        run, out, _ = exported(folder, shared, **changes)
        long = "ein kleines Haus läuft. " * 400
        assert generated(out, [long], **GREEDY) == ours(run, [long], beam=1)


# ---- the tokenizer ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(
    tmp_path_factory: pytest.TempPathFactory,
    shared: tuple[Tokenizer, Tokenizer],
    half_trained: dict[str, Transformer],
) -> tuple[Path, Path]:
    """(run, exported directory), read-only."""
    folder = tmp_path_factory.mktemp("export")
    run, out, _ = exported_model(folder, half_trained["pre"], shared)
    return run, out


@pytest.fixture(scope="module")
def tokenizer(written: tuple[Path, Path]) -> Any:
    return transformers.AutoTokenizer.from_pretrained(written[1])


PARTS = st.sampled_from(
    [
        "<pad>",
        "<unk>",
        "<s>",
        "</s>",
        " ",
        "  ",
        "\n",
        "\r\n",
        "é",
        "e\u0301",
        "👩\u200d👧",
        "the",
        "\x00",
    ]
)
TEXT = st.lists(st.one_of(st.text(max_size=8), PARTS), max_size=8).map("".join)


@given(TEXT)
@settings(max_examples=300, deadline=None)
def test_ids_of_any_text(tokenizer: Any, shared: tuple[Tokenizer, Tokenizer], text: str) -> None:
    """Text that looks like a control symbol became one; text was normalised or stripped."""
    ids = tokenizer(text)["input_ids"]
    assert ids == [*shared[0].encode(text), EOS_ID]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@given(st.lists(st.integers(0, 299), max_size=12))
@settings(max_examples=300, deadline=None)
def test_text_of_any_ids(
    tokenizer: Any, shared: tuple[Tokenizer, Tokenizer], ids: list[int]
) -> None:
    """Bytes that are no UTF-8 were written otherwise than by mttrain."""
    ids = [index for index in ids if index < shared[0].size]
    assert tokenizer.decode(ids, skip_special_tokens=True) == shared[0].decode(ids)


def test_id_by_id(tokenizer: Any, shared: tuple[Tokenizer, Tokenizer], tmp_path: Path) -> None:
    """Case X05: another order of the vocabulary, or a line too many."""
    shared[0].save(tmp_path / "ours.json")
    vocab = json.loads((tmp_path / "ours.json").read_text(encoding="utf-8"))["model"]["vocab"]
    assert tokenizer.get_vocab() == vocab and len(tokenizer) == shared[0].size
    names = [tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id]
    assert [*names, tokenizer.eos_token_id] == [0, 1, 2, 3]


def test_saving_again_changes_nothing(written: tuple[Path, Path], tmp_path: Path) -> None:
    """Saved again after fine-tuning, the positions or the guard of the tokenizer were gone."""
    tokenizer, model = load(written[1])
    tokenizer.save_pretrained(tmp_path / "again")
    model.save_pretrained(tmp_path / "again")
    assert generated(tmp_path / "again", LINES) == generated(written[1], LINES)
    again, _ = load(tmp_path / "again")
    assert again("</s>")["input_ids"] == tokenizer("</s>")["input_ids"]


# ---- a process of somebody who does not have mttrain ------------------------------------------


def card_code(out: Path, lines: list[str]) -> str:
    """The code of a model card, about other sentences."""
    found = re.search(r"```python\n(.*?)```", (out / "README.md").read_text("utf-8"), re.DOTALL)
    assert found is not None
    code = re.sub(r"^sentences = .*$", lambda _: f"sentences = {lines!r}", found[1], flags=re.M)
    assert repr(lines) in code
    return code


def test_the_code_of_the_card_translates(
    written: tuple[Path, Path], separate: tuple[Tokenizer, Tokenizer], tmp_path: Path
) -> None:
    """The card showed code that did not run, the directory needed mttrain to be loaded, or the
    output was turned into text with the vocabulary of the source."""
    model = trained_model(separate, norm="post", tie="target")
    runs = [written[0], exported_model(tmp_path, model, separate)[0]]
    code = "import os, sys\nsys.modules['mttrain'] = None\n"
    for run in runs:
        code += f"os.chdir({str(run.parent)!r})\n{card_code(run.parent / 'out', LINES)}"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUTF8": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == [text for run in runs for text in ours(run, LINES)]
    assert "newly initialized" not in done.stderr and "arning" not in done.stderr


# ---- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"activation": "swiglu"}, "model.activation is swiglu"),
        ({"layer_norm_eps": 1e-6}, "model.layer_norm_eps is 1e-06"),
        ({"positions": "learned", "max_positions": 50}, "model.positions is learned"),
    ],
    ids=str,
)
def test_settings_without_a_counterpart(
    changes: dict[str, Any], words: str, shared: tuple[Tokenizer, Tokenizer], tmp_path: Path
) -> None:
    """X01: a setting that the other program does not know was dropped in silence."""
    run = make_run(tmp_path, random_model(shared, norm="post", **changes), shared)
    with pytest.raises(ConfigError, match=words):
        export_huggingface(str(run), tmp_path / "out", lines=LINES, replace=False)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_damaged_decode_section(shared: tuple[Tokenizer, Tokenizer], tmp_path: Path) -> None:
    """What pydantic says of meta.json reached the user."""
    run = make_run(tmp_path, random_model(shared), shared, decode={"beam": 0})
    with pytest.raises(CheckpointError, match="the decode section of meta"):
        export_huggingface(str(run), tmp_path / "out", lines=LINES, replace=False)


def test_a_failed_comparison_leaves_nothing(
    shared: tuple[Tokenizer, Tokenizer], tmp_path: Path
) -> None:
    """A directory that does not translate stayed under the final name, or aside."""
    model = random_model(shared)
    with torch.no_grad():
        model.decoder.layers[0].fc1.bias[0] = math.nan  # type: ignore[union-attr, index]
    run = make_run(tmp_path, model, shared)
    with pytest.raises(CheckpointError, match="The export was not written"):
        export_huggingface(str(run), tmp_path / "out", lines=LINES, replace=False)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_an_earlier_export_is_replaced_only_when_asked(
    shared: tuple[Tokenizer, Tokenizer], tmp_path: Path
) -> None:
    """Somebody's files, or a better model, were overwritten."""
    run, out, report = exported(tmp_path, shared)
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="--replace"):
        export_huggingface(str(run), out, lines=LINES, replace=False)
    assert (out / "model.safetensors").read_bytes() == before
    assert json.loads((out / MARKER).read_text())["lines"] == report.lines
    (out / "extra").write_text("x")
    export_huggingface(str(run), out, lines=LINES, replace=True)
    assert not (out / "extra").exists()
    with pytest.raises(ConfigError, match="no export"):
        export_huggingface(str(run), run, lines=LINES, replace=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


# ---- what the comparison must find ------------------------------------------------------------


def alter_json(name: str, **changes: Any) -> Callable[[Path], None]:
    def alter(folder: Path) -> None:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
        (folder / name).write_text(json.dumps({**content, **changes}), encoding="utf-8")

    return alter


def alter_tensors(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def alter(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(
            {name: value.contiguous() for name, value in tensors.items()},
            folder / "model.safetensors",
            {"format": "pt"},
        )

    return alter


def columns_as_ours(tensors: dict[str, torch.Tensor]) -> None:
    """What an export would be that only renames: the columns of one matrix not in order."""
    name = "model.encoder.layers.0.fc1.weight"
    order = residual_order(ModelConfig(d_model=32, num_heads=2))
    tensors[name] = tensors[name][:, order.argsort()]


def forget(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = torch.zeros_like(tensors[name])

    return change


def far_positions(tensors: dict[str, torch.Tensor]) -> None:
    """Short sentences look fine."""
    tensors["model.encoder.embed_positions.weight"][150:] = 0


FAULTS: dict[str, Callable[[Path], None]] = {
    "columns": alter_tensors(columns_as_ours),
    "bias": alter_tensors(forget("model.decoder.layers.0.encoder_attn.k_proj.weight")),
    "final norm": alter_tensors(forget("model.decoder.layer_norm.bias")),
    "far positions": alter_tensors(far_positions),
    "scale": alter_json("config.json", scale_embedding=False),
    "activation": alter_json("config.json", activation_function="gelu"),
    "heads": alter_json("config.json", encoder_attention_heads=4),
    "start": alter_json("generation_config.json", decoder_start_token_id=5),
    "literal </s>": alter_json("tokenizer_config.json", split_special_tokens=False),
    "no EOS": alter_json("tokenizer.json", post_processor=None),
    "normalised": alter_json("tokenizer.json", normalizer={"type": "NFC"}),
    "stripped": alter_json(
        "tokenizer.json", normalizer={"type": "Strip", "strip_left": True, "strip_right": True}
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_finds(
    fault: str, shared: tuple[Tokenizer, Tokenizer], written: tuple[Path, Path], tmp_path: Path
) -> None:
    """An export that is wrong in one place passed its own check."""
    run, out = written
    folder = tmp_path / "wrong"
    folder.mkdir()
    for path in out.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    translator = Translator.load(run, device="cpu", precision="fp32")
    arguments = (transformers, folder, translator, LINES, 14, False)
    assert hfcheck.compare(*arguments).equal == len(LINES)
    FAULTS[fault](folder)
    with pytest.raises(CheckpointError, match="The export was not written"):
        hfcheck.compare(*arguments)
