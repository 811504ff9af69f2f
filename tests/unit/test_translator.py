"""The translator around a real Transformer with random weights: batches, scores, precision."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mttrain.checkpoint import ModelBundle, save_checkpoint
from mttrain.config import ModelConfig, parse_config
from mttrain.distributed import compute_type
from mttrain.errors import CheckpointError, ConfigError, DataError
from mttrain.inference import ModelStepper
from mttrain.model import Transformer
from mttrain.search import EnsembleStepper, SearchOptions, beam_search, greedy_search, search
from mttrain.tokenizer import BOS_ID, EOS_ID, PAD_ID, UNK_ID, Tokenizer, train_tokenizer
from mttrain.translator import TranslateOptions, Translation, Translator

WORDS = ["the", "a", "house", "dog", "is", "small", "runs", "to", "green", "bye", "zwei", "drei"]


LONG_EOS = 0.65  # ends most outputs of a one-layer model before their limits


def sentences(
    count: int, longest: int, seed: int = 1, tokens: Tokenizer | None = None
) -> list[str]:
    """Random lines of 1 to `longest` words, or of as many tokens."""
    draw = random.Random(seed)
    lines = []
    for _ in range(count):
        size = draw.randint(1, longest)
        words = draw.choices(WORDS, k=size)
        while tokens is not None and size < len(tokens.encode(" ".join(words))) and words[1:]:
            words.pop()
        lines.append(" ".join(words))
    return lines


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(sentences(200, 20), vocab_size=300)


def transformer(size: int, seed: int = 1, eos: float = 0.54, **settings: object) -> Transformer:
    """Sharp random weights, so that outputs differ; `eos` draws towards the end of sentence."""
    values: dict[str, object] = {
        "d_model": 16, "d_ff": 32, "num_heads": 2, "encoder_layers": 2, "decoder_layers": 2,
        "dropout": 0.0, "tie": "none", "norm": "pre", **settings,
    }  # fmt: skip
    torch.manual_seed(seed)
    model = Transformer(ModelConfig(**values), size, size)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                cross = "encoder_attn.v" in name or "encoder_attn.out" in name
                parameter.mul_(8.0 if cross else 3.0 if "layers" in name else 1.5)
        model.lm_head.weight.mul_(2.5 / 1.5)
        last: Any = model.decoder if model.config.norm == "pre" else model.decoder.layers[-1]
        (last.layer_norm if model.config.norm == "pre" else last.final_layer_norm).bias.fill_(1.0)
        model.lm_head.weight[EOS_ID] = eos
    return model.eval()


def bundle(model: Transformer, tokenizer: Tokenizer, **meta: object) -> ModelBundle:
    return ModelBundle(model, tokenizer, tokenizer, {"max_length": 256, **meta}, Path("here"))


def translator(tokenizer: Tokenizer, **settings: Any) -> Translator:
    return Translator(bundle(transformer(tokenizer.size, **settings), tokenizer))


def run(engine: Translator, lines: list[str], **options: Any) -> list[Translation]:
    return list(engine.translate_lines(lines, TranslateOptions(**options)))


# --- the same text whatever the batch ---------------------------------------------------------


@pytest.mark.parametrize("beam", [1, 5])
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_batch_size_changes_nothing(tokenizer: Tokenizer, beam: int, norm: str) -> None:
    """S07: stops unmasked padding, limits taken from the batch and finished sentences that go on
    changing: 1 to 25 words, batches of 1, 2, 7, 64 and by tokens, sorted in large and small
    windows, fp32. Scores within 1e-4."""
    engine, lines = translator(tokenizer, norm=norm), sentences(40, 25, seed=2)
    # Random weights love to repeat themselves; without that the outputs differ more.
    options: dict[str, Any] = {"beam": beam, "max_length": 30, "no_repeat_ngram": 1}
    options["min_length"] = 3

    alone = run(engine, lines, batch_size=1, **options)
    assert len({t.text for t in alone}) > 12  # or equality would say little
    for batching in (
        {"batch_size": 2}, {"batch_size": 7, "window": 7}, {"batch_size": 64},
        {"batch_tokens": 300},
    ):  # fmt: skip
        found = run(engine, lines, **options, **batching)
        assert [t.text for t in found] == [t.text for t in alone]
        for one, other in zip(found, alone, strict=True):
            assert one.hypotheses[0].score == pytest.approx(other.hypotheses[0].score, abs=1e-4)


def assert_same_texts(found: list[Translation], alone: list[Translation]) -> None:
    """Equal but for one float tie in a hundred lines, where two hypotheses score the same."""
    equal = 0
    for one, other in zip(found, alone, strict=True):
        if [h.text for h in one.hypotheses] == [h.text for h in other.hypotheses]:
            equal += 1
            for a, b in zip(one.hypotheses, other.hypotheses, strict=True):
                assert a.score == pytest.approx(b.score, abs=1e-4, rel=1e-6)
    assert equal >= 0.99 * len(alone)


def test_batch_size_changes_nothing_on_long_texts(tokenizer: Tokenizer) -> None:
    """S07 with the options that people use, none: 200 lines of 1 to 80 tokens, long and short ones
    mixed, greedy and with the default beam, one by one, in batches of 2, 7 and 64, and unsorted."""
    engine = translator(tokenizer, encoder_layers=1, decoder_layers=1, eos=LONG_EOS)
    lines = sentences(200, 80, seed=3, tokens=tokenizer)
    lengths = [len(tokenizer.encode(line)) for line in lines]
    assert min(lengths) == 1 and 70 < max(lengths) <= 80
    for beam, sizes in ((1, (64,)), (5, (2, 64))):
        alone = run(engine, lines, beam=beam, batch_size=1, window=1)
        assert len({t.text for t in alone}) > 50  # or equality would say little
        for size in sizes:
            assert_same_texts(run(engine, lines, beam=beam, batch_size=size), alone)
        assert_same_texts(run(engine, lines, beam=beam, batch_size=7, window=7), alone)


@pytest.mark.parametrize("kind", ["nbest", "split", "ensemble"])
def test_batch_size_changes_nothing_elsewhere(tokenizer: Tokenizer, kind: str) -> None:
    """S07 for n-best lists, for long lines in parts, and for two models together."""
    seeds = (1, 2) if kind == "ensemble" else (1,)
    models = [
        transformer(tokenizer.size, seed=seed, encoder_layers=1, decoder_layers=1, eos=LONG_EOS)
        for seed in seeds
    ]
    engine = Translator([bundle(model, tokenizer, max_length=20) for model in models])
    lines = sentences(40, 60, seed=4, tokens=tokenizer)
    options: dict[str, Any] = {"beam": 3}
    if kind == "nbest":
        options["nbest"] = 3
    if kind == "split":
        options["split_long"] = True
        lines = [line.replace("house", "house.").replace("dog", "dog!") for line in lines]
    alone = run(engine, lines, batch_size=1, **options)
    assert max(t.pieces for t in alone) > (2 if kind == "split" else 0)
    assert max(len(t.hypotheses) for t in alone) == options.get("nbest", 1)
    for size in (2, 7, 64):
        assert_same_texts(run(engine, lines, batch_size=size, **options), alone)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"min_length": 6, "no_repeat_ngram": 2},
        {"max_length": 9, "length_penalty": 0.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("forced", [False, True])
def test_beam_one_is_greedy(tokenizer: Tokenizer, options: dict[str, Any], forced: bool) -> None:
    """S11 with a real Transformer, its cache and its padding: same tokens, same score."""
    model = transformer(tokenizer.size)
    lines = sentences(60, 12, seed=5)
    src = source_batch(tokenizer, lines)
    rules = SearchOptions(beam=1, forbidden=(0, 1, 2, *tokenizer.newline_ids), **options)
    prefixes = [tokenizer.encode(line)[: i % 3] for i, line in enumerate(lines)]
    more: dict[str, Any] = {"limit": 30, "prefixes": prefixes if forced else None}
    with torch.no_grad():
        greedy = greedy_search(ModelStepper(model), src, rules, **more)
        beamed = beam_search(ModelStepper(model), src, rules, **more)
    for [one], [other] in zip(greedy, beamed, strict=True):
        assert (one.tokens, one.finished) == (other.tokens, other.finished)
        assert one.score == pytest.approx(other.score, abs=1e-5)
    assert len({one.tokens for [one] in greedy}) > 10


def test_default_limit_is_the_lines_own(tokenizer: Tokenizer) -> None:
    """S07, S14: the default output limit of a line does not come from its neighbours."""
    engine, lines = translator(tokenizer, eos=-9.0), ["a", *sentences(5, 30)]
    for found in (run(engine, lines), run(engine, lines, beam=1, batch_size=2)):
        for translation in found:
            source = len(tokenizer.encode(translation.source))
            assert len(translation.hypotheses[0].tokens) == 3 * source + 20
            assert translation.hit_limit


@pytest.mark.parametrize("beam", [1, 4])
def test_sampling_does_not_depend_on_the_batch(tokenizer: Tokenizer, beam: int) -> None:
    """A drawn text is a function of seed, line and step: batching and order of work do not show;
    the same line at another place draws anew, another seed too."""
    engine = translator(tokenizer)
    lines = [*sentences(20, 15, seed=4), *sentences(20, 15, seed=4)]
    options: dict[str, Any] = {"sample": True, "beam": beam, "nbest": beam, "max_length": 15}
    alone = run(engine, lines, batch_size=1, **options)
    for batching in ({"batch_size": 16}, {"batch_tokens": 200}, {"batch_size": 7, "window": 9}):
        found = run(engine, lines, **batching, **options)
        for one, other in zip(found, alone, strict=True):
            assert [h.text for h in one.hypotheses] == [h.text for h in other.hypotheses]
    assert [t.text for t in alone[:20]] != [t.text for t in alone[20:]]
    assert [t.text for t in run(engine, lines, seed=2, **options)] != [t.text for t in alone]


# --- scores -----------------------------------------------------------------------------------


def assert_scores_are_forced_scores(engine: Translator, found: list[Translation]) -> None:
    items, wanted = [], []
    for translation in found:
        source = [*engine.source_tokenizer.encode(translation.source), EOS_ID]
        for h in translation.hypotheses:
            items.append((source, [*h.tokens, *([EOS_ID] if h.finished else [])]))
            wanted.append(h)
    sums = engine.score_ids(items)
    for total, h, (_, target) in zip(sums, wanted, items, strict=True):
        assert h.score == pytest.approx(total, abs=1e-4)
        assert h.ranked == pytest.approx(total / len(target), abs=1e-4)
    assert {h.finished for h in wanted} == {True, False}


@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("models", [1, 2])
def test_printed_score_is_the_models_own(tokenizer: Tokenizer, beam: int, models: int) -> None:
    """S10: teacher forcing of the printed ids (and EOS where there is one) gives the printed
    score: for every n-best entry, cut ones too, and for an ensemble."""
    bundles = [bundle(transformer(tokenizer.size, seed=s), tokenizer) for s in range(1, models + 1)]
    engine = Translator(bundles)
    found = run(engine, sentences(30, 12), beam=beam, nbest=beam, max_length=12)
    assert_scores_are_forced_scores(engine, found)


def test_sampled_scores_are_the_models_own(tokenizer: Tokenizer) -> None:
    """S10 for sampling with temperature, top_k and blocked n-grams."""
    engine = translator(tokenizer)
    found = run(
        engine, sentences(30, 12), sample=True, nbest=2, temperature=1.3, top_k=20, max_length=12,
        no_repeat_ngram=2,
    )  # fmt: skip
    assert_scores_are_forced_scores(engine, found)


def test_forced_scores_equal_cross_entropy(tokenizer: Tokenizer) -> None:
    """The likelihood of given pairs, against F.cross_entropy one pair at a time without padding;
    it does not depend on the batch (M08), order is kept, EOS counts."""
    engine = translator(tokenizer)
    pairs = list(zip(sentences(25, 15, seed=5), sentences(25, 15, seed=6), strict=True))
    pairs.append(("", "a"))
    found = engine.score(pairs)
    for (source, target), score in zip(pairs, found, strict=True):
        src = torch.tensor([[*tokenizer.encode(source), EOS_ID]])
        out = torch.tensor([*tokenizer.encode(target), EOS_ID])
        tgt_in = torch.tensor([[BOS_ID, *tokenizer.encode(target)]])
        with torch.no_grad():
            logits = engine.models[0].project(engine.models[0](src, tgt_in))[0]
        nll = F.cross_entropy(logits, out, reduction="sum")
        assert score.sum == pytest.approx(-float(nll), abs=1e-3)
        assert score.tokens == len(out) and not score.cut
    for tokens in (1, 100):
        other = engine.score(pairs, batch_tokens=tokens)
        assert [o.sum for o in other] == pytest.approx([f.sum for f in found], abs=1e-3)


# --- the model under the search ---------------------------------------------------------------


@dataclass(frozen=True)
class Recomputed:
    src: Tensor  # [R, S]
    prefix: Tensor  # [R, t]

    def reorder(self, rows: Tensor) -> Recomputed:
        return Recomputed(self.src[rows], self.prefix[rows])


class FullPass:
    """The same model without a cache: the whole prefix is fed again at every step."""

    def __init__(self, model: Transformer) -> None:
        self.model, self.vocab_size = model, model.lm_head.out_features

    def start(self, src: Tensor) -> Recomputed:
        return Recomputed(src, src.new_empty((len(src), 0)))

    def step(self, tokens: Tensor, state: Recomputed) -> tuple[Tensor, Recomputed]:
        state = replace(state, prefix=torch.cat([state.prefix, tokens[:, None]], 1))
        hidden = self.model(state.src, state.prefix)
        return self.model.project(hidden[:, -1]).log_softmax(-1), state

    def reorder(self, state: Recomputed, rows: Tensor, kept: Tensor | None) -> Recomputed:
        return state.reorder(rows)


def source_batch(tokenizer: Tokenizer, lines: list[str]) -> Tensor:
    ids = [[*tokenizer.encode(line), EOS_ID] for line in lines]
    width = max(map(len, ids))
    return torch.tensor([row + [PAD_ID] * (width - len(row)) for row in ids])


@pytest.mark.parametrize("beam", [1, 5])
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_cached_search_equals_recomputing(tokenizer: Tokenizer, beam: int, norm: str) -> None:
    """S12, S13: stops caches that stay behind when beams change places, positions off by one and
    masks of the wrong width: uneven batch, sentences end at different steps; same tokens, scores
    within 1e-4."""
    model = transformer(tokenizer.size, norm=norm)
    src = source_batch(tokenizer, sentences(60, 15, seed=8))
    options = SearchOptions(beam=beam, nbest=beam, max_length=16)
    with torch.no_grad():
        cached = search(ModelStepper(model), src, options)
        plain = search(FullPass(model), src, options)
    lengths = set()
    for one, other in zip(cached, plain, strict=True):
        assert [h.tokens for h in one] == [h.tokens for h in other]
        for a, b in zip(one, other, strict=True):
            assert a.score == pytest.approx(b.score, abs=1e-4)
            lengths.add(len(a.tokens))
    assert len(lengths) > 4


@pytest.mark.parametrize("beam", [1, 6])
def test_control_tokens_never_come_out(tokenizer: Tokenizer, beam: int) -> None:
    """S20, S21: an untrained model on 200 lines, raw ids: no padding, unknown or BOS, no line
    ends, no duplicates in the n-best list."""
    torch.manual_seed(3)
    config = ModelConfig(d_model=8, d_ff=8, num_heads=1, encoder_layers=1, decoder_layers=1)
    engine = Translator(bundle(Transformer(config, tokenizer.size, tokenizer.size), tokenizer))
    never = {PAD_ID, UNK_ID, BOS_ID, EOS_ID, *tokenizer.newline_ids}
    for translation in run(engine, sentences(200, 6), beam=beam, nbest=beam, max_length=9):
        assert not never & {token for h in translation.hypotheses for token in h.tokens}
        tokens = [h.tokens for h in translation.hypotheses]
        assert len(set(tokens)) == len(tokens)


def test_dropout_is_off_and_training_mode_comes_back(tokenizer: Tokenizer) -> None:
    """M13: translating inside training twice gives bit-equal scores, and leaves the model in
    training mode."""
    model = transformer(
        tokenizer.size, dropout=0.3, attention_dropout=0.2, activation_dropout=0.2
    ).train()
    engine, lines = Translator(bundle(model, tokenizer)), sentences(50, 10)
    first, second = (run(engine, lines, beam=2, max_length=10) for _ in range(2))
    assert first == second
    assert engine.score([("a", "b")] * 3) == engine.score([("a", "b")] * 3)
    assert model.training and all(module.training for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())
    model.eval()
    assert run(engine, lines, beam=2, max_length=10) == first
    assert not model.training


def test_learned_positions_end_both_sides(tokenizer: Tokenizer) -> None:
    """M12: beyond the learned positions nothing is read silently: the source is cut and marked,
    the output ends at the last position; asking for more source is refused."""
    engine = translator(tokenizer, positions="learned", max_positions=24, eos=-9.0)
    long = sentences(1, 1)[0] + " house" * 500
    for options in ({"beam": 1}, {"beam": 3, "max_length": 2000}):
        found = run(engine, [long, "a", long], **options)
        assert [t.source_cut for t in found] == [True, False, True]
        limit = 24 if "max_length" in options else min(24, 3 * 1 + 20)
        assert [len(t.hypotheses[0].tokens) for t in found] == [24, limit, 24]
        assert all(t.hit_limit for t in found)
    with pytest.raises(ConfigError, match="24"):
        run(engine, ["a"], max_source_length=25)
    [score] = engine.score([("a", long)])
    assert score.cut and score.tokens == 24


def test_sinusoidal_positions_have_no_end(tokenizer: Tokenizer) -> None:
    """M12: a source and an output far beyond the first rows of the position table."""
    engine = translator(tokenizer, eos=-9.0, encoder_layers=1, decoder_layers=1)
    [found] = run(engine, ["house " * 500], beam=1, max_length=600)
    assert not found.source_cut and len(found.hypotheses[0].tokens) == 600


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("beam", [1, 4])
def test_reduced_precision(tokenizer: Tokenizer, precision: str, beam: int) -> None:
    """S19, S23, M02: scores of long outputs stay finite; printed ones near those of fp32; ids are
    integers throughout."""
    model = transformer(tokenizer.size, eos=-1.0)
    full = Translator(bundle(model, tokenizer))
    half = Translator(bundle(model, tokenizer), precision=precision)
    lines = sentences(6, 8)
    found = run(half, lines, beam=beam, max_length=80)
    pairs = [(t.source, t.text) for t in found]
    for one, other in zip(half.score(pairs), full.score(pairs), strict=True):
        assert one.sum / one.tokens == pytest.approx(other.sum / other.tokens, abs=0.5)
    for translation in found:
        assert translation.hypotheses[0].score == pytest.approx(
            translation.hypotheses[0].score, abs=0
        )  # NaN is not equal to itself
        assert -1e5 < translation.hypotheses[0].score < 0


def test_a_model_in_training_is_read_anew(tokenizer: Tokenizer) -> None:
    """Weights prepared for decoding are those of now, not of the last validation."""
    model, lines = transformer(tokenizer.size), sentences(20, 10)
    engine = Translator(bundle(model, tokenizer))
    before = run(engine, lines, max_length=12)
    other = transformer(tokenizer.size, seed=2)
    model.load_state_dict(other.state_dict())
    wanted = run(Translator(bundle(other, tokenizer)), lines, max_length=12)
    assert run(engine, lines, max_length=12) == wanted != before


@pytest.mark.parametrize("beam", [1, 4])
def test_int8_does_not_depend_on_the_batch(tokenizer: Tokenizer, beam: int) -> None:
    """S23: a scale for a whole batch would let each line change its neighbours."""
    torch.manual_seed(1)
    config = ModelConfig(d_model=512, d_ff=512, num_heads=4, encoder_layers=1, decoder_layers=1)
    model = Transformer(config, tokenizer.size, tokenizer.size).eval()
    engine = Translator(bundle(model, tokenizer), precision="int8")
    lines = sentences(30, 8)
    options: dict[str, Any] = {"beam": beam, "max_length": 9}
    found = run(engine, lines, **options)
    alone = run(engine, lines, batch_size=1, **options)
    assert [t.text for t in found] == [t.text for t in alone]
    for one, other in zip(found, alone, strict=True):
        # Float32 sums differ by the batch in their last digit, which may turn a rounding to 8 bits.
        assert one.hypotheses[0].score == pytest.approx(other.hypotheses[0].score, abs=5e-3)
    exact = run(Translator(bundle(model, tokenizer)), lines, **options)
    for one, other in zip(found, exact, strict=True):
        assert one.hypotheses[0].score != other.hypotheses[0].score
        assert one.hypotheses[0].score == pytest.approx(other.hypotheses[0].score, abs=0.5)


def test_int8_is_for_a_cpu(tokenizer: Tokenizer) -> None:
    """On a GPU it would run in float32 without a word."""
    with pytest.raises(ConfigError, match="int8 runs on a CPU, not on cuda"):
        compute_type("int8", torch.device("cuda"))
    with pytest.raises(ConfigError, match="precision"):
        parse_config({"train": {"precision": "int8"}})


def test_training_goes_on_after_long_lines(tokenizer: Tokenizer) -> None:
    """A position table that grew while a validation decoded could not be used by autograd."""
    model = transformer(tokenizer.size, eos=-9.0, encoder_layers=1, decoder_layers=1)
    run(Translator(bundle(model, tokenizer)), ["house " * 300], beam=1, max_length=300)
    ids = torch.full((1, 280), 5)
    model.train()(ids, ids).sum().backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if n != "lm_head.weight")


# --- loading and ensembles --------------------------------------------------------------------


def test_an_ensemble_of_one_model_twice_is_that_model(tokenizer: Tokenizer) -> None:
    model, lines = transformer(tokenizer.size), sentences(20, 10)
    one = run(Translator(bundle(model, tokenizer)), lines, max_length=12)
    two = run(Translator([bundle(model, tokenizer)] * 2), lines, max_length=12)
    assert [t.text for t in one] == [t.text for t in two]
    for a, b in zip(one, two, strict=True):
        assert a.hypotheses[0].score == pytest.approx(b.hypotheses[0].score, abs=1e-4)


def test_an_ensemble_averages_probabilities(tokenizer: Tokenizer) -> None:
    """Against log of the mean of exp, token by token; other than either model alone."""
    models = [transformer(tokenizer.size, seed=seed) for seed in (1, 2)]
    src = source_batch(tokenizer, sentences(5, 8))
    tokens = torch.full((5,), BOS_ID)
    with torch.no_grad():
        first = tokens[:, None]
        each = [model.project(model(src, first)[:, 0]).double().softmax(-1) for model in models]
        both = EnsembleStepper([ModelStepper(model) for model in models])
        log_probs, _ = both.step(tokens, both.start(src))
    assert torch.allclose(log_probs.double(), torch.stack(each).mean(0).log(), atol=1e-4)


def test_an_ensemble_needs_one_tokenizer(tokenizer: Tokenizer) -> None:
    """R17 for ensembles: equal size with another order would give fluent nonsense."""
    other = train_tokenizer(sentences(200, 20, seed=9)[::-1] + ["xx yy"] * 9, vocab_size=300)
    model = transformer(tokenizer.size)
    with pytest.raises(CheckpointError, match="tokenizer"):
        Translator([bundle(model, tokenizer), bundle(model, other)])


def test_an_ensemble_needs_one_direction(tokenizer: Tokenizer) -> None:
    """Models into German and into French with one vocabulary were averaged without a word; a model
    that does not tell its languages is taken."""
    model = transformer(tokenizer.size)
    first = bundle(model, tokenizer, source_lang="en", target_lang="de")
    for other, side in (({"target_lang": "fr"}, "target"), ({"source_lang": "fr"}, "source")):
        meta: dict[str, object] = {"source_lang": "en", "target_lang": "de", **other}
        with pytest.raises(CheckpointError, match=rf"different {side} languages \(fr and"):
            Translator([first, bundle(model, tokenizer, **meta)])
    Translator([first, bundle(model, tokenizer, source_lang="en")])


def test_a_pair_too_large_for_the_memory(tokenizer: Tokenizer) -> None:
    """Forced scoring halves its batches as translation does, and names the pair that is left."""

    class Small(Transformer):
        most = 9

        def forward(self, src: Tensor, tgt_in: Tensor) -> Tensor:
            if tgt_in.numel() > self.most:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            return super().forward(src, tgt_in)

    model = transformer(tokenizer.size)
    small = Small(model.config, tokenizer.size, tokenizer.size)
    small.load_state_dict(model.state_dict())
    pairs = [("a", "x"), ("b", "y"), ("c", "zz"), ("d", "x")]
    wanted = Translator(bundle(model, tokenizer)).score(pairs)
    engine = Translator(bundle(small, tokenizer))
    assert [s.sum for s in engine.score(pairs)] == pytest.approx([s.sum for s in wanted], abs=1e-4)
    with pytest.raises(DataError, match="Pair 2 does not fit into memory"):
        engine.score([("a", "x"), ("a", "q" * 20)])


def test_forced_scoring_cuts_like_translation(tokenizer: Tokenizer) -> None:
    """`eval` read more of a source for the likelihood than for the translation, or less."""
    engine = Translator(bundle(transformer(tokenizer.size), tokenizer, max_length=1500))
    text = "q" * 1200
    assert not engine.score([(text, "a")])[0].cut
    [cut] = engine.score([(text, "a")], max_source_length=10)
    assert cut.cut and cut.sum == engine.score([(text[:9], "a")])[0].sum
    learned = translator(tokenizer, positions="learned", max_positions=24)
    with pytest.raises(ConfigError, match="24 positions"):
        learned.score([("a", "a")], max_source_length=25)


def test_a_saved_model_translates_alike(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """E10: what training translates with the model in memory, `translate` gives from the saved
    checkpoint with the same options; two checkpoints load as an ensemble."""
    model, lines = transformer(tokenizer.size, dropout=0.2).train(), sentences(20, 10)
    meta = {"source_lang": "en", "target_lang": "de", "max_length": 256}
    inside = run(Translator([bundle(model, tokenizer)], device=torch.device("cpu")), lines, beam=3)
    path = save_checkpoint(tmp_path, 10, model, meta, (tokenizer, tokenizer), None)
    loaded = Translator.load(path, device="cpu", threads=torch.get_num_threads())
    assert run(loaded, lines, beam=3) == inside
    pair = Translator.load([path, str(path)], device="cpu")
    assert [t.text for t in run(pair, lines, beam=3)] == [t.text for t in inside]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"nbest": 2, "split_long": True}, "split_long"),
        ({"batch_tokens": -5}, "batch_tokens"),
        ({"batch_size": 4, "batch_tokens": 100}, "not both"),
        ({"window": 0}, "window"),
        ({"max_source_length": 1}, "max_source_length"),
        ({"beam": 0}, "beam"),
    ],
)
def test_illegal_options(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        TranslateOptions(**options)


# ---- tags -------------------------------------------------------------------------------------


TAGGED = {"tags": {"2de": "de", "2zh": "zh"}, "untagged": False, "target_lang": "de"}


@pytest.fixture(scope="module")
def tagged() -> Translator:
    vocabulary = train_tokenizer(sentences(200, 20), vocab_size=300, tags=["2de", "2zh", "2fr"])
    model = transformer(vocabulary.size, eos=LONG_EOS)
    return Translator(bundle(model, vocabulary, **{**TAGGED, "max_length": 8}))


def test_the_tag_stands_before_every_source(tagged: Translator) -> None:
    """What the search is given must be what training was given: the tag, the subwords, EOS; then
    the outputs, their scores and forced scores are those of these ids."""
    lines = [*sentences(20, 6, seed=4), "", "<2de> a house"]
    ids = {line: tagged.source_tokenizer.encode(line) for line in lines}
    options = tagged.completed(TranslateOptions(beam=2, tag="2zh", max_length=12))
    assert {4, 5, 6} <= set(options.forbidden)
    model = tagged.models[0]
    for line, found in zip(lines, tagged.translate_lines(lines, options), strict=True):
        if not line:
            assert found.blank
            continue
        source = [tagged.source_tokenizer.tags["2zh"], *ids[line], EOS_ID]
        with torch.inference_mode():
            best = search(ModelStepper(model), torch.tensor([source]), options)[0][0]
        assert found.hypotheses[0].tokens == best.tokens
        assert found.hypotheses[0].score == pytest.approx(best.score, abs=1e-4)
        (forced,) = tagged.score([(line, found.text)], tag="2zh")
        target = [*tagged.target_tokenizer.encode(found.text), EOS_ID]
        assert forced.sum == pytest.approx(tagged.score_ids([(source, target)])[0], abs=1e-4)


def test_the_tag_counts_where_sources_are_cut(tagged: Translator) -> None:
    """A tag that is cut away, or pushes EOS out; parts of a long line without their tag, or one
    longer than any training source."""
    seen: list[list[int]] = []
    plain = tagged.engine.searcher

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(engine, name)

        def searcher(self) -> Any:
            find = plain()

            def watch(rows: Any, options: Any) -> Any:
                seen.extend(row.ids for row in rows)
                return find(rows, options)

            return watch

    engine = tagged.engine
    watched: Any = Watched()
    other = Translator.with_engine(watched, tagged.members[0])
    line = "the house is small. a dog runs to green. bye."
    for options in ({"max_source_length": 5}, {"split_long": True}):
        seen.clear()
        (found,) = run(other, [line], tag="2zh", beam=1, max_length=5, **options)
        assert all(row[0] == 5 and row[-1] == EOS_ID and 5 not in row[1:] for row in seen)
        if "split_long" in options:
            assert len(seen) == found.pieces > 1
            texts = [other.source_tokenizer.decode(row) for row in seen]
            assert sorted(" ".join(texts).split()) == sorted(line.split())
        else:
            assert [len(row) for row in seen] == [5] and found.source_cut


def test_parts_are_joined_as_the_language_of_the_tag_wants(tagged: Translator) -> None:
    """Chinese has no space between sentences, German has; the model's main language is one."""
    sides = ["the house is small.", "a dog runs to green."]
    for tag, space in (("2de", " "), ("2zh", "")):
        options = {"beam": 1, "max_length": 4, "tag": tag}
        parts = [found.text.strip() for found in run(tagged, sides, **options)]
        (whole,) = run(tagged, [" ".join(sides)], split_long=True, **options)
        assert whole.pieces == 2 and all(parts) and whole.text == space.join(parts)


def test_tags_that_a_model_does_not_know(tokenizer: Tokenizer, tagged: Translator) -> None:
    """Refused before anything is translated, in every way to ask, and by each member."""
    plain = translator(tokenizer)
    ways: list[Any] = [
        lambda model, tag: model.completed(TranslateOptions(tag=tag)),
        lambda model, tag: model.translate(["a"], TranslateOptions(tag=tag)),
        lambda model, tag: model.score([("a", "b")], tag=tag),
        lambda model, tag: model.encode_sources(["a"], tag),
    ]
    for way in ways:
        with pytest.raises(ConfigError, match="without tags"):
            way(plain, "2de")
        with pytest.raises(ConfigError, match="one of 2de, 2zh"):
            way(tagged, None)
        with pytest.raises(ConfigError, match="2fr is unknown"):  # in the vocabulary, untrained
            way(tagged, "2fr")
    first = tagged.bundles[0]
    less = replace(first, meta={**first.meta, "tags": {"2de": "de"}}, path=Path("less"))
    both = Translator([first, less])
    assert both.translate(["a"], TranslateOptions(beam=1, max_length=3, tag="2de"))
    with pytest.raises(ConfigError, match="2zh is unknown to less"):
        both.translate(["a"], TranslateOptions(tag="2zh"))
    broken = replace(first, meta={**TAGGED, "tags": {"2xx": "xx"}})
    with pytest.raises(CheckpointError, match="source tokenizer has no tag 2xx"):
        Translator([broken]).encode_sources(["a"], "2xx")
