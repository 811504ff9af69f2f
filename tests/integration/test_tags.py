"""One model for several languages: tags and mixing, through training and the command line."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from mttrain.checkpoint import read_meta, resolve_model
from mttrain.cli import main
from mttrain.errors import ConfigError
from mttrain.loop import Trainer
from mttrain.runlog import read_log
from mttrain.trainer import train
from mttrain.translator import TranslateOptions, Translator
from tests.integration.training_help import random_sentences, tiny_config, write_pairs
from tests.system.compare_help import differences

Capture = pytest.CaptureFixture[str]
WORDS = 8  # of the toy languages


def loud(line: str) -> str:
    return line.upper()


def turned(line: str) -> str:
    return " ".join(word[::-1] for word in line.split())


LANGUAGES = {"yy": loud, "zz": turned}
HELD_OUT = random_sentences(20, seed=9, longest=3, words=WORDS)


def many_to_many(folder: Path, **more: Any) -> dict[str, Any]:
    """xx to yy and to zz, and from both back to xx; far less of zz."""
    train = []
    for lang, make in LANGUAGES.items():
        count = 200 if lang == "yy" else 50
        lines = random_sentences(count, seed=len(train), longest=3, words=WORDS)
        there = write_pairs(folder, f"xx-{lang}", [(line, make(line)) for line in lines])
        back = write_pairs(folder, f"{lang}-xx", [(make(line), line) for line in lines])
        train.append({**there, "target_lang": lang, "tag": True})
        train.append({**back, "source_lang": lang, "target_lang": "xx", "tag": True})
    valid = write_pairs(folder, "valid", [(line, turned(line)) for line in HELD_OUT])
    return {
        "source_lang": "xx",
        "target_lang": "yy",
        "train": train,
        "valid": {**valid, "target_lang": "zz", "tag": True},
        "temperature": 5,
        **more,
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained model of four directions."""
    folder = tmp_path_factory.mktemp("tags")
    settings = {
        "batch_tokens": 300, "max_steps": 600, "valid_every": 300, "log_every": 50,
        "best_metric": "chrf",
    }  # fmt: skip
    config = tiny_config(
        folder,
        many_to_many(folder),
        train=settings,
        model={"dropout": 0.0},
        optim={"lr": 5e-3, "warmup_steps": 40},
    )
    return train(config).run_dir


def share_right(outputs: list[str], wanted: list[str]) -> float:
    return sum(map(str.__eq__, outputs, wanted)) / len(wanted)


def test_the_tag_decides_the_language(run: Path) -> None:
    """A tag that training or translation leaves out gives one language for all: the same source
    must become two texts, and a direction never trained as such finds its target too."""
    model = Translator.load(run, device="cpu")

    def output(lines: list[str], tag: str) -> list[str]:
        return model.translate(lines, TranslateOptions(beam=1, tag=tag))

    for lang, make in LANGUAGES.items():
        wanted = [make(line) for line in HELD_OUT]
        assert share_right(output(HELD_OUT, f"2{lang}"), wanted) > 0.7
        assert share_right(output(wanted, "2xx"), HELD_OUT) > 0.7
    # Validation translates with the tag of its corpus, which is not the main target language.
    assert model.members[0].meta["scores"]["chrf"] > 60


def test_what_a_checkpoint_and_the_log_say(run: Path) -> None:
    """Without the tags in meta.json no command could refuse a wrong one; without the mixture in the
    log nobody knows later what the model has seen."""
    meta = read_meta(resolve_model(run))
    assert meta["tags"] == {"2yy": "yy", "2xx": "xx", "2zz": "zz"} and meta["untagged"] is False
    (encoded,) = [r for r in read_log(run / "log.jsonl") if r["kind"] == "encoded"]
    sizes = [corpus["pairs"] for corpus in encoded["corpora"]]
    times = [corpus["times"] for corpus in encoded["corpora"]]
    shares = [size * one for size, one in zip(sizes, times, strict=True)]
    assert shares[0] / shares[2] == pytest.approx((sizes[0] / sizes[2]) ** (1 / 5))
    assert sum(shares) == pytest.approx(sum(sizes))
    assert [corpus["tag"] for corpus in encoded["corpora"]] == ["2yy", "2xx", "2zz", "2xx"]


def test_resuming_with_tags_mixing_and_dropout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draws of the mixture, subwords under BPE-dropout behind a tag: a run stopped in each epoch
    must go on to the same weights, to the bit."""
    text = many_to_many(tmp_path)
    sections: dict[str, Any] = {
        "tokenizer": {"dropout": 0.3},
        "train": {"batch_tokens": 900, "max_steps": 9, "valid_every": 9},
    }
    whole = train(tiny_config(tmp_path / "whole", text, **sections)).run_dir
    config = tiny_config(tmp_path / "cut", text, **sections)
    plain = Trainer._update
    for stop in (2, 5):

        def update(self: Trainer, *arguments: Any, stop: int = stop, **named: Any) -> Any:
            result = plain(self, *arguments, **named)
            if self.progress.update == stop:
                signal.raise_signal(signal.SIGTERM)
            return result

        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "_update", update)
            assert train(config).reason == "SIGTERM"
    assert differences(train(config).run_dir, whole, 9) == []
    other = tiny_config(tmp_path / "cut", {**text, "temperature": 2}, **sections)
    with pytest.raises(ConfigError, match="temperature: 5"):
        train(other)


def test_a_given_vocabulary_must_hold_the_tags(tmp_path: Path, capsys: Capture) -> None:
    """A tag cannot be added later: `mttrain tokenize --tag` makes a vocabulary that has it, and one
    without it is refused with that remedy, before anything is kept that would be in the way."""
    text = many_to_many(tmp_path)
    files = [corpus[side] for corpus in text["train"] for side in ("source", "target")]
    plain, tagged = (str(tmp_path / name) for name in ("plain.json", "tagged.json"))
    learn = ["tokenize", *files, "--vocab-size", "300", "--output"]
    assert main([*learn, plain]) == 0
    tags = ["--tag", "2xx", "--tag", "2yy", "--tag", "2zz"]
    assert main([*learn, tagged, *tags]) == 0
    assert main([*learn, str(tmp_path / "x.json"), "--tag", "a b"]) == 2
    assert "--tag a b: a tag is up to 64 letters" in capsys.readouterr().err
    sections: dict[str, Any] = {"train": {"max_steps": 1, "valid_every": 1}}
    config = tiny_config(tmp_path, text, tokenizer={"path": plain, "vocab_size": 6000}, **sections)
    with pytest.raises(ConfigError, match=r"2yy, 2xx, 2zz; make one with .* --tag 2yy --tag 2xx"):
        train(config)
    Path(tagged).replace(plain)
    train(config)  # the same settings, another file


def test_the_commands_want_a_tag_that_was_trained(
    run: Path, random_run: Path, tmp_path: Path, capsys: Capture
) -> None:
    """One text for all languages, or nonsense for an untrained tag: each command refuses, names
    what there is, and writes nothing."""
    (source,) = write_lines_of(tmp_path, HELD_OUT)
    output = tmp_path / "out"
    commands = {
        "translate": ["--input", source, "--output", str(output)],
        "eval": ["--source", source, "--ref", source, "--output", str(output)],
        "score": ["--source", source, "--target", source, "--output", str(output)],
    }
    for command, options in commands.items():
        for tag, model, message in (
            ([], run, "was trained on text with tags alone: give --tag NAME, one of 2yy, 2xx, 2zz"),
            (["--tag", "2de"], run, "--tag 2de is unknown to"),
            (["--tag", "2zz"], random_run, "without tags: --tag has no effect; remove it"),
        ):
            assert main([command, "--model", str(model), *options, *tag]) == 2, command
            assert message in capsys.readouterr().err, command
            assert not output.exists()
    assert main(["eval", "--hyp", source, "--ref", source, "--tag", "2zz"]) == 2
    assert "--hyp, which is translated already: --tag" in capsys.readouterr().err


def test_the_commands_feed_the_tag(run: Path, tmp_path: Path, capsys: Capture) -> None:
    """What `translate`, `eval` and `score` give is of the language of the tag, and of one kind: the
    score of a translation is that of the search."""
    sources, loudly, turnedly = write_lines_of(
        tmp_path, HELD_OUT, [loud(x) for x in HELD_OUT], [turned(x) for x in HELD_OUT]
    )
    model = ["--model", str(run), "--device", "cpu", "--beam", "1"]
    figures = {}
    for tag, reference in (("2yy", loudly), ("2zz", turnedly)):
        assert main(["translate", *model, "--input", sources, "--tag", tag, "--scores"]) == 0
        rows = [row.split(" ||| ") for row in capsys.readouterr().out.splitlines()]
        wanted = Path(reference).read_text().splitlines()
        assert share_right([row[1] for row in rows], wanted) > 0.7
        (outputs,) = write_lines_of(tmp_path / tag, [row[1] for row in rows])
        assert (
            main(["score", *model[:4], "--source", sources, "--target", outputs, "--tag", tag]) == 0
        )
        again = [float(row.split(" ||| ")[0]) for row in capsys.readouterr().out.splitlines()]
        assert again == pytest.approx([float(row[2]) for row in rows], abs=1e-4)
        for ref in (loudly, turnedly):
            command = ["eval", *model, "--source", sources, "--ref", ref, "--tag", tag, "--json"]
            assert main(command) == 0
            result = json.loads(capsys.readouterr().out)
            assert result["decoding"]["tag"] == tag and result["lang"] == tag[1:]
            figures[tag, ref] = result["nll"]
    assert figures["2yy", loudly] < figures["2yy", turnedly]
    assert figures["2zz", turnedly] < figures["2zz", loudly]


def write_lines_of(folder: Path, *texts: list[str]) -> list[str]:
    folder.mkdir(exist_ok=True)
    paths = [folder / f"text{number}" for number in range(len(texts))]
    for path, lines in zip(paths, texts, strict=True):
        path.write_text("".join(f"{line}\n" for line in lines))
    return list(map(str, paths))


def test_what_is_made_of_a_run_with_tags(run: Path, tmp_path: Path, capsys: Capture) -> None:
    """An export that was compared without a tag compared nothing the model knows; an average
    without its tags takes none; a picture or a report that feeds no tag shows another language."""
    for kind in ("ctranslate2", "huggingface"):
        output = tmp_path / kind
        command = ["export", str(run), str(output), "--to", kind]
        source = tmp_path / "lines"
        source.write_text("\n".join(HELD_OUT) + "\n")
        assert main([*command, "--lines", str(source)]) == 0, capsys.readouterr().err
    average = tmp_path / "average"
    assert main(["average", str(run), "--last", "2", "--output", str(average)]) == 0
    kept = read_meta(average)
    assert kept["tags"] == read_meta(resolve_model(run))["tags"] and kept["untagged"] is False
    links = ["attention", str(run), "--input", str(tmp_path / "lines"), "--format", "pharaoh"]
    assert main(links) == 2 and "--tag" in capsys.readouterr().err
    assert main([*links, "--tag", "2zz"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(HELD_OUT)
    page = tmp_path / "page.html"
    assert main(["report", str(run), "--output", str(page)]) == 0
    reverse = turned(HELD_OUT[0])
    assert "Nothing was translated" not in page.read_text() and reverse in page.read_text()
