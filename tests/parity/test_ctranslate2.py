"""CTranslate2 against our own engine: exported directories, and the engine behind `Translator`.

The oracle is the other program: for every kind of model its own search over the exported weights
must give the ids of ours, and its scores must be our forced scores. The models are random, with
weights so large that outputs hang on their sources.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mttrain.checkpoint import load_model
from mttrain.ct2 import compare, export_ctranslate2, probe
from mttrain.ct2_engine import load_exported
from mttrain.ct2_files import VOCABULARIES
from mttrain.errors import CheckpointError, ConfigError
from mttrain.rundir import META
from mttrain.tokenizer import EOS_ID, SPECIAL, Tokenizer, train_tokenizer
from mttrain.translator import ModelStepper, TranslateOptions, Translation, Translator
from tests.parity.ct2_help import one_sentence, saved, sentences, transformer

ctranslate2 = pytest.importorskip("ctranslate2")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(sentences(200, 20), vocab_size=300)


@pytest.fixture(scope="module")
def other_tokenizer() -> Tokenizer:
    return train_tokenizer(sentences(200, 20, seed=5), vocab_size=290)


@pytest.fixture(scope="module")
def pair(
    tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Translator, Translator]:
    """The same model behind both engines."""
    folder = tmp_path_factory.mktemp("pair")
    checkpoint = saved(folder, transformer(tokenizer), tokenizer)
    export_ctranslate2(checkpoint, folder / "out", lines=sentences(10, 10))
    return Translator(load_model(checkpoint)), load_exported(folder / "out", device="cpu")


def both(
    pair: tuple[Translator, Translator], lines: list[str], prefixes: Any = None, **options: Any
) -> Iterator[tuple[Translation, Translation]]:
    wanted = TranslateOptions(**options)
    found = [list(engine.translate_lines(lines, wanted, prefixes)) for engine in pair]
    return zip(*found, strict=True)


def close(one: Translation, other: Translation) -> bool:
    """The same best output, or one that ranks the same to the last digits."""
    mine, its = one.hypotheses[0], other.hypotheses[0]
    return mine.tokens == its.tokens or abs(mine.ranked - its.ranked) < 1e-4


def assert_forced_scores(native: Translator, found: list[Translation]) -> None:
    """Every score is our model's own of the tokens and of EOS, if it ended."""
    limit = native.completed(TranslateOptions()).max_source_length
    items, scores = [], []
    for translation in found:
        source = native.source_tokenizer.encode(translation.source)[: limit - 1]  # type: ignore
        for h in translation.hypotheses:
            if h.tokens or h.finished:
                items.append(([*source, EOS_ID], [*h.tokens, *[EOS_ID] * h.finished]))
                scores.append(h.score)
    assert scores == pytest.approx(native.score_ids(items), abs=1e-4, rel=3e-5)


# ---- kinds of models ----------------------------------------------------------------------------

TIES = [("all", True), ("target", True), ("target", False), ("none", True), ("none", False)]
KINDS = list(itertools.product(("pre", "post"), ("relu", "gelu", "swiglu"), (0, 60)))
VARIANTS = [(*kind, *TIES[i % 5]) for i, kind in enumerate(KINDS)]
VARIANTS += [("pre", "relu", 0, *tie) for tie in TIES] + [
    ("post", "relu", 60, *tie) for tie in TIES
]


@pytest.mark.parametrize(("norm", "activation", "positions", "tie", "shared"), VARIANTS)
def test_every_kind_of_model(
    tokenizer: Tokenizer,
    other_tokenizer: Tokenizer,
    tmp_path: Path,
    norm: str,
    activation: str,
    positions: int,
    tie: str,
    shared: bool,
) -> None:
    """Stops a weight in the wrong place, a missing scale, another epsilon, another activation,
    positions from 1 or in another order, and a wrong symbol at either end."""
    where: dict[str, Any] = {"positions": "sinusoidal"}
    if positions:
        where = {"positions": "learned", "max_positions": positions}
    target = tokenizer if shared else other_tokenizer
    model = transformer(
        tokenizer, target, norm=norm, activation=activation, tie=tie,
        layer_norm_eps=1e-3, **where,
    )  # fmt: skip
    checkpoint = saved(tmp_path, model, tokenizer, target)
    lines = sentences(30, 12, seed=3)
    report = export_ctranslate2(checkpoint, tmp_path / "out", lines=lines)
    assert report.lines == 30 and report.equal >= 29
    native = Translator(load_model(checkpoint))
    engines = native, load_exported(tmp_path / "out", device="cpu")
    answers = list(both(engines, lines, beam=1, max_length=40))
    assert len({one.text for one, _ in answers}) > 5  # or equality would say little
    for one, other in answers:
        assert close(one, other)
    assert_forced_scores(native, [other for _, other in answers])
    texts = [(line, one.text) for line, (one, _) in zip(lines, answers, strict=True)]
    ours, theirs = (engine.score(texts) for engine in engines)
    assert [s.sum for s in theirs] == pytest.approx([s.sum for s in ours], abs=1e-3, rel=5e-5)
    assert [s.tokens for s in theirs] == [s.tokens for s in ours]


def test_scales_that_are_left_out(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The other program divides every score by sqrt(E) and may scale embeddings: a model that does
    neither must come out the same."""
    model = transformer(tokenizer, scale_embedding=False, scale_attention=False)
    lines = sentences(20, 12)
    report = export_ctranslate2(saved(tmp_path, model, tokenizer), tmp_path / "o", lines=lines)
    assert report.equal >= 19


def test_odd_sizes(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Widths and depths that share no factor, and one head."""
    model = transformer(
        tokenizer, d_model=21, d_ff=13, num_heads=1, encoder_layers=1, decoder_layers=3
    )
    lines = sentences(20, 12)
    report = export_ctranslate2(saved(tmp_path, model, tokenizer), tmp_path / "o", lines=lines)
    assert report.equal >= 19


# ---- the search -------------------------------------------------------------------------------


@pytest.mark.parametrize("penalty", [1.0, 0.0, 0.6, -0.5])
def test_beam_search_agrees(pair: tuple[Translator, Translator], penalty: float) -> None:
    """Stops another normalisation by length, another end of the search, and scores that a mask has
    changed: the whole list is that of our search."""
    lines = sentences(60, 15, seed=4)
    answers = list(both(pair, lines, beam=4, nbest=4, length_penalty=penalty, max_length=20))
    assert len({one.text for one, _ in answers}) > 15  # or equality would say little
    for one, other in answers:
        assert close(one, other)
        ranks = [[h.ranked for h in found.hypotheses] for found in (one, other)]
        assert ranks[1] == pytest.approx(ranks[0], abs=1e-4, rel=1e-5)
    found = [other for _, other in answers]
    assert_forced_scores(pair[0], found)
    options = TranslateOptions(beam=4, nbest=4, length_penalty=penalty)
    for translation in found:
        keys = [(not h.finished, -h.ranked) for h in translation.hypotheses]
        assert keys == sorted(keys) and len(translation.hypotheses) <= 4
        for h in translation.hypotheses:
            assert h.ranked == pytest.approx(options.ranked(h.score, len(h.tokens), h.finished))
            assert not {0, 1, 2, 3} & set(h.tokens)


@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("limit", [None, 1, 2, 7])
def test_every_line_has_its_own_limit(
    pair: tuple[Translator, Translator], beam: int, limit: int | None
) -> None:
    """Stops the limit of the longest line of a batch from being that of all, EOS from not being
    counted, and an output that was cut from being marked as finished."""
    lines = sentences(40, 12, seed=6)
    answers = list(both(pair, lines, beam=beam, max_length=limit))
    assert sum(one.hit_limit for one, _ in answers) > 3
    for one, other in answers:
        assert close(one, other)
        for h in other.hypotheses:
            source = len(pair[0].source_tokenizer.encode(other.source))
            most = limit or 3 * source + 20
            assert len(h.tokens) + h.finished <= most
            assert h.finished or len(h.tokens) == most
        assert one.hit_limit == other.hit_limit
    assert_forced_scores(pair[0], [other for _, other in answers])


def test_learned_positions_end(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Stops outputs from running beyond the learned positions, and a forced pass over an output
    at their end from failing."""
    settings = {"positions": "learned", "max_positions": 16}
    checkpoint = saved(tmp_path, transformer(tokenizer, **settings), tokenizer)
    lines = sentences(30, 30, seed=7)
    export_ctranslate2(checkpoint, tmp_path / "out", lines=lines)
    native = Translator(load_model(checkpoint))
    engines = native, load_exported(tmp_path / "out", device="cpu")
    for beam in (1, 3):
        answers = list(both(engines, lines, beam=beam, max_length=50))
        assert all(close(one, other) for one, other in answers)
        longest = max(len(h.tokens) for _, other in answers for h in other.hypotheses)
        assert longest == 16 or (beam > 1 and longest < 16)
        assert any(other.source_cut for _, other in answers)
        assert [a.flags() for a, _ in answers] == [b.flags() for _, b in answers]
        assert_forced_scores(native, [other for _, other in answers])
    for one, other in both(engines, lines, beam=1, min_length=20):  # more than there is room for
        assert close(one, other) and len(other.hypotheses[0].tokens) == 16
    with pytest.raises(ConfigError, match="has 16 positions"):
        engines[1].translate(lines, TranslateOptions(max_source_length=17))


def test_greedy_masks_are_ours(pair: tuple[Translator, Translator]) -> None:
    """min_length and no_repeat_ngram mean the same without a beam; the scores stay the model's."""
    lines = sentences(40, 12, seed=8)
    for options in ({"min_length": 9}, {"no_repeat_ngram": 2}, {"no_repeat_ngram": 1}):
        answers = list(both(pair, lines, beam=1, max_length=25, **options))
        assert all(close(one, other) for one, other in answers)
        assert_forced_scores(pair[0], [other for _, other in answers])


@pytest.mark.parametrize("beam", [1, 4])
def test_prefixes(pair: tuple[Translator, Translator], beam: int) -> None:
    """Stops a prefix from being left out of text, score or limit; half of the lines have none.

    Where the end symbol is among the likeliest right after the prefix, the library's beam search
    loses a hypothesis; so not all need be equal with a beam, but those without a prefix."""
    lines = sentences(40, 10, seed=9)
    prefixes = ["ein kleines" if i % 2 else "" for i in range(len(lines))]
    answers = list(both(pair, lines, prefixes, beam=beam, max_length=14))
    for (one, other), prefix in zip(answers, prefixes, strict=True):
        assert close(one, other) or (beam > 1 and prefix)
        assert other.text.startswith(prefix)
    assert_forced_scores(pair[0], [other for _, other in answers])
    long = ["ein kleines Haus " * 3] * len(lines)
    for one, other in both(pair, lines, long, beam=beam, max_length=4):
        assert other.text.startswith(long[0].strip()) and other.pieces == one.pieces
        assert close(one, other) or beam > 1


@pytest.mark.parametrize("beam", [1, 4])
def test_batches_change_nothing(pair: tuple[Translator, Translator], beam: int) -> None:
    lines = ["", *sentences(30, 15, seed=10), "   ", "</s> <pad> <s>"]
    engine = pair[1]
    alone = list(engine.translate_lines(lines, TranslateOptions(beam=beam, batch_size=1)))
    for batching in ({"batch_size": 7}, {"batch_tokens": 200}, {}):
        found = engine.translate_lines(lines, TranslateOptions(beam=beam, **batching))
        for one, other in zip(alone, found, strict=True):
            assert close(one, other) and one.flags() == other.flags()
    assert [a.text for a in (alone[0], alone[31])] == ["", ""] and alone[0].blank


def test_long_lines_in_parts(pair: tuple[Translator, Translator]) -> None:
    """Parts of a line are rows of their own, joined with a score that sums theirs."""
    line = " ".join(f"{text}." for text in sentences(25, 6, seed=11))
    for one, other in both(pair, [line, "the dog"], beam=2, split_long=True, max_length=10):
        assert close(one, other) and one.pieces == other.pieces and one.text == other.text
        assert other.hypotheses[0].score == pytest.approx(one.hypotheses[0].score, abs=1e-3)


def test_a_forbidden_token_is_never_produced(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Stops a control symbol or a line end from coming out of a model that likes nothing better:
    the search without a mask has to be made again with one, and scored without."""
    model = transformer(tokenizer)
    likely = [0, 1, 2, *tokenizer.newline_ids]
    with torch.no_grad():
        model.lm_head.weight[likely] = model.lm_head.weight[EOS_ID] * 0.98
    checkpoint = saved(tmp_path, model, tokenizer)
    lines = sentences(30, 10, seed=12)
    export_ctranslate2(checkpoint, tmp_path / "out", lines=lines)
    native = Translator(load_model(checkpoint))
    engines = native, load_exported(tmp_path / "out", device="cpu")
    plain = ctranslate2.Translator(str(tmp_path / "out"))
    found = plain.translate_batch([_tokens(tmp_path / "out", line) for line in lines], beam_size=1)
    assert any(set(SPECIAL) & set(result.hypotheses[0]) for result in found)  # it does like them
    for beam in (1, 4):
        answers = list(both(engines, lines, beam=beam, max_length=12))
        for one, other in answers:
            assert not set(likely) & set(other.hypotheses[0].tokens)
            assert beam > 1 or close(one, other)
        assert_forced_scores(native, [other for _, other in answers])


def _tokens(folder: Path, line: str) -> list[str]:
    import tokenizers

    made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [*made.encode(line).tokens, "</s>"]


# ---- the directory ----------------------------------------------------------------------------


def test_vocabulary_by_id(tmp_path: Path) -> None:
    """Stops tokens that read alike (bytes that are no UTF-8, a learned "<s>") from sharing an id,
    and a literal control symbol in the text from becoming one."""
    text = ["a <s> <s> <s> b", "<pad><pad></s></s> <unk>", "\xa0\u3000 x\ty", "\x00\x01 \x85"] * 3
    made = train_tokenizer([*text, *sentences(50, 9)], vocab_size=330)
    checkpoint = saved(tmp_path, transformer(made), made)
    export_ctranslate2(checkpoint, tmp_path / "out", lines=[*text[:4], *sentences(5, 9)])
    tokens = json.loads((tmp_path / "out" / VOCABULARIES["shared"]).read_text())
    assert len(set(tokens)) == len(tokens) == made.size
    index = {token: i for i, token in enumerate(tokens)}
    for line in text:
        ids = [index[token] for token in _tokens(tmp_path / "out", line)]
        assert ids == [*made.encode(line), EOS_ID]


@pytest.fixture(scope="module")
def calm(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Translator:
    model = one_sentence(tokenizer, "the dog")
    return Translator(load_model(saved(tmp_path_factory.mktemp("calm"), model, tokenizer)))


@pytest.mark.parametrize("kind", ["int8", "int8_float32", "int16", "float16", "bfloat16"])
def test_rounded_weights(calm: Translator, tmp_path: Path, kind: str) -> None:
    """The report says how much rounding changed; the model in memory stays as it was."""
    native = calm
    before = [parameter.clone() for parameter in native.models[0].parameters()]
    report = export_ctranslate2(
        native, tmp_path / "out", lines=sentences(20, 10), quantization=kind
    )
    assert report.format == f"ctranslate2 {kind}" and report.equal == 20
    assert any("chrF 100.0 against" in note for note in report.notes)
    meta = json.loads((tmp_path / "out" / META).read_text())
    assert meta["export"]["quantization"] == kind
    exported = load_exported(tmp_path / "out", device="cpu")
    assert exported.translate(["Hund"], TranslateOptions(beam=1)) == ["the dog"]
    for old, new in zip(before, native.models[0].parameters(), strict=True):
        assert torch.equal(old, new)


def test_unknown_type_of_weights(pair: tuple[Translator, Translator], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--quantization int4 is unknown; use one of int8, "):
        export_ctranslate2(pair[0], tmp_path / "out", lines=["a"], quantization="int4")
    assert not list(tmp_path.iterdir())


# ---- the comparison -----------------------------------------------------------------------------


def with_stepper(native: Translator, change: Callable[[Any, torch.dtype], Any]) -> Translator:
    return Translator(native.bundles[0], make_stepper=change)


def test_an_export_that_translates_otherwise_fails(
    pair: tuple[Translator, Translator], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Stops an export with wrong weights from getting its name: the model here searches with other
    weights than those that are written."""
    other = transformer(tokenizer, seed=2)
    wrong = Translator(
        pair[0].bundles[0], make_stepper=lambda model, dtype: ModelStepper(other, dtype)
    )
    with pytest.raises(CheckpointError) as caught:
        export_ctranslate2(wrong, tmp_path / "out", lines=["the dog", "ein kleines Haus"])
    theirs = pair[1].translate(["the dog"], TranslateOptions(beam=1))[0]
    assert "line 1 of those compared, 'the dog'" in str(caught.value)
    assert repr(theirs)[:40] in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_changed_weights_are_seen_without_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Every tensor matters to the scores of random ids: one that is changed after the export is
    noticed, whatever the lines are."""
    checkpoint = saved(tmp_path, transformer(tokenizer), tokenizer)
    native = Translator(load_model(checkpoint))
    export_ctranslate2(native, tmp_path / "out", lines=["the dog"])
    exported = load_exported(tmp_path / "out", device="cpu")
    probe(native, exported, exact=True)
    for name, parameter in native.models[0].named_parameters():
        if name.endswith("k_proj.bias"):  # softmax does not see what is added to all keys
            continue
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter.add_(torch.randn_like(parameter) * 0.3)
        with pytest.raises(CheckpointError, match="random ids"):
            probe(native, exported, exact=True)
        with torch.no_grad():
            parameter.copy_(kept)


def test_ties_are_told(pair: tuple[Translator, Translator], tokenizer: Tokenizer) -> None:
    """Two tokens of equal probability may come out either way; that is counted, not refused."""
    native = pair[0]
    lines = sentences(40, 10, seed=13)
    used = Counter(
        token
        for found in native.translate_lines(lines, TranslateOptions(beam=1))
        for token in found.hypotheses[0].tokens
    )
    (first, _), *_ = used.most_common()
    second = next(i for i in range(len(SPECIAL) + 20, tokenizer.size) if i not in used)
    model = copy.deepcopy(native.models[0])
    with torch.no_grad():  # twins: the same logit, the same effect on what follows
        model.lm_head.weight[second] = model.lm_head.weight[first]
        model.decoder.embed_tokens.weight[second] = model.decoder.embed_tokens.weight[first]

    class Other(ModelStepper):
        """Takes the second of the twins, where both are tried in the order of their ids."""

        def step(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
            log_probs, state = super().step(tokens, state)
            log_probs[:, second] += 1e-6 if second > first else -1e-6
            return log_probs, state

    twins = replace(native.bundles[0], model=model)
    mine, its = Translator(twins, make_stepper=Other), Translator(twins)
    result = compare(mine, its, lines, exact=True)
    assert result.equal < 40
    assert f"{40 - result.equal} lines differ where two tokens are equally likely." in result.notes


def test_rounded_weights_may_not_differ_much(
    pair: tuple[Translator, Translator], tokenizer: Tokenizer
) -> None:
    model = transformer(tokenizer, seed=2)
    other = Translator(replace(pair[0].bundles[0], model=model))
    with pytest.raises(CheckpointError, match=r"less than chrF 60; line \d+ is "):
        compare(other, pair[1], sentences(10, 10), exact=False)


@pytest.mark.parametrize(("lang", "tokenize"), [("zh", "char"), ("fr", "13a")])
def test_rounded_weights_are_scored_in_the_language_of_the_tag(
    lang: str, tokenize: str, tmp_path: Path
) -> None:
    """A model that is asked for another language by its tag had its outputs compared by words where
    there are none, or by letters where there are words."""
    from sacrebleu.metrics.bleu import BLEU

    texts = ["one two three four five six", "one two three four five seven"]
    made = train_tokenizer(texts * 9, vocab_size=330, tags=["x"])
    meta = {"target_lang": {"zh": "de", "fr": "zh"}[lang], "tags": {"x": lang}, "untagged": False}
    one, other = (
        Translator(load_model(saved(tmp_path / text, one_sentence(made, text), made, **meta)))
        for text in texts
    )
    assert [t.translate(["a"], TranslateOptions(beam=1, tag="x")) for t in (one, other)] == [
        [text] for text in texts
    ]
    wanted = BLEU(tokenize=tokenize).corpus_score([texts[1]] * 3, [[texts[0]] * 3]).score
    [note] = compare(one, other, ["a", "b", "c"], exact=False).notes
    assert f"BLEU {wanted:.1f} and" in note


# ---- loading ----------------------------------------------------------------------------------


def damaged(folder: Path, name: str, change: Callable[[bytes], bytes]) -> Path:
    path = folder / name
    path.write_bytes(change(path.read_bytes()))
    return folder


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("model.bin", lambda data: data[:-1], "model.bin is damaged"),
        ("model.bin", None, "is no directory of `mttrain export --to ctranslate2`"),
        ("tokenizer.json", lambda data: data + b" ", "tokenizer.json is damaged"),
        ("shared_vocabulary.json", None, "is missing"),
        ("config.json", None, "is missing"),
        (META, lambda data: b"{}", "export is missing"),
        (META, lambda data: data.replace(b'"positions"', b'"x"'), "positions is missing"),
        (META, lambda data: data.replace(b"ctranslate2", b"other"), "describes no export"),
    ],
)
def test_damage_is_named(
    pair: tuple[Translator, Translator],
    tmp_path: Path,
    name: str,
    change: Any,
    message: str,
) -> None:
    """Stops damaged files from reaching the library, which reads them in C++."""
    export_ctranslate2(pair[0], tmp_path / "out", lines=["a"])
    if change is None:
        (tmp_path / "out" / name).unlink()
    else:
        damaged(tmp_path / "out", name, change)
    with pytest.raises(CheckpointError, match=message):
        load_exported(tmp_path / "out", device="cpu")


def test_vocabulary_of_another_order_is_refused(
    pair: tuple[Translator, Translator], tmp_path: Path
) -> None:
    """Another order of the same tokens is fluent nonsense; even with a hash that fits."""
    from mttrain.corpus import file_sha256

    out = tmp_path / "out"
    export_ctranslate2(pair[0], out, lines=["a"])
    path = out / VOCABULARIES["shared"]
    path.write_text(json.dumps(list(reversed(json.loads(path.read_text())))))
    meta = json.loads((out / META).read_text())
    meta["files"][path.name] = file_sha256(path)
    (out / META).write_text(json.dumps(meta))
    with pytest.raises(CheckpointError, match="not those of the tokenizers"):
        load_exported(out, device="cpu")
