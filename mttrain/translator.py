"""Text to text: lines in, as many lines out, in their order, whatever the batches were.

Lines are read in windows, encoded, sorted by length so that batches hold little padding, searched,
and put back in order. Blank lines never reach the model. A line with more subwords than the limit
is cut (EOS kept) and marked; `split_long` translates long lines sentence by sentence instead. A
batch that does not fit into memory is halved until it does. A tag stands before each source, and
before each part of one that is split.
What turns ids into hypotheses is an engine (module `engine`): our own search over one model or an
ensemble, or another program.

Price: a window is in memory at a time and its first line comes out with its last; a batch size of
1 makes the window one line, for typing at it.

Shapes: none; tensors are the engine's business.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from mttrain.checkpoint import ModelBundle, load_model
from mttrain.config import DecodeConfig
from mttrain.corpus import one_line
from mttrain.distributed import choose_device, compute_type
from mttrain.engine import Described, Engine, Item, Row, Search, TorchEngine
from mttrain.errors import CheckpointError, ConfigError, DataError
from mttrain.inference import ModelStepper
from mttrain.languages import sentence_space
from mttrain.machine import prepare_cpu
from mttrain.members import check_ensemble, tag_ids
from mttrain.model import Transformer
from mttrain.search import Hypothesis, Stepper
from mttrain.segments import (
    DEFAULT_BATCH_TOKENS,
    Line,
    Result,
    TranslateOptions,
    batches,
    cut_ids,
    in_halves,
    numbered_lines,
    sentence_pairs,
    split_sentences,
)
from mttrain.tags import needed_tag, tag_lang
from mttrain.tokenizer import BOS_ID, EOS_ID, PAD_ID
from mttrain.translations import (
    Summary,
    TranslatedHypothesis,
    Translation,
    has_loop,
    output_lines,
)

__all__ = [
    "ForcedScore",
    "ModelStepper",
    "Summary",
    "TranslateOptions",
    "TranslatedHypothesis",
    "Translation",
    "Translator",
    "output_lines",
]

DEFAULT_MAX_SOURCE = 1000  # subwords, EOS included


@dataclass(frozen=True, slots=True)
class ForcedScore:
    """Log-probability of a given translation: natural log, summed over `tokens`, EOS included."""

    sum: float
    tokens: int
    cut: bool = False  # source or target was longer than the limit
    ids: tuple[int, ...] = ()  # of the target, EOS included, and the log-probability of each:
    each: tuple[float, ...] = ()  # both only when they are asked for


@dataclass(frozen=True, slots=True)
class _Unit:
    """What one search row translates: a line, or one of the parts of a long line."""

    place: int  # index in the window
    line: int  # its number, from 1
    row: Row
    cut: bool


class Translator:
    """One model, or an ensemble, that turns lines into lines and scores given pairs."""

    bundles: list[ModelBundle]  # of our own engine; empty with another one
    members: list[Described]  # the same, or what stands for the model of another engine

    def __init__(
        self,
        bundles: ModelBundle | Sequence[ModelBundle],
        device: str | torch.device | None = None,
        precision: str = "auto",
        make_stepper: Callable[[Any, torch.dtype], Stepper[Any]] = ModelStepper,
    ) -> None:
        """Use built models; `device` None leaves them where they are.

        make_stepper: what the search works with, of a model and the type of its products.
        CheckpointError when the members of an ensemble have other tokenizers or languages.
        """
        self.bundles = [bundles] if isinstance(bundles, ModelBundle) else list(bundles)
        assert self.bundles, "a translator needs a model"
        check_ensemble(self.bundles)
        models = self.models
        if device is None:
            chosen = next(models[0].parameters()).device
        else:
            chosen = choose_device(device) if isinstance(device, str) else device
            for model in models:
                model.to(chosen)
        self.dtype = compute_type(precision, chosen)
        self._use(TorchEngine(models, chosen, self.dtype, make_stepper), self.bundles)

    def _use(self, engine: Engine, members: Sequence[Described]) -> None:
        self.engine, self.members = engine, list(members)
        self.source_tokenizer = members[0].source_tokenizer
        self.target_tokenizer = members[0].target_tokenizer

    @classmethod
    def with_engine(cls, engine: Engine, model: Described) -> Translator:
        """The same treatment of text around another engine, which holds the model."""
        translator = cls.__new__(cls)
        translator.bundles = []
        translator._use(engine, [model])
        return translator

    @classmethod
    def load(
        cls,
        paths: str | Path | Sequence[str | Path],
        *,
        device: str = "auto",
        precision: str = "auto",
        threads: int | None = None,
    ) -> Translator:
        """Load a run directory or checkpoint, or several as an ensemble.

        threads: of the CPU; see `prepare_cpu` for what None means. The weights are prepared for
        decoding once: changing them afterwards has no effect.
        """
        prepare_cpu(threads)
        chosen = choose_device(device)
        names = [paths] if isinstance(paths, str | Path) else list(paths)
        translator = cls([load_model(name, chosen) for name in names], chosen, precision)
        assert isinstance(translator.engine, TorchEngine)
        translator.engine.frozen = True
        return translator

    @property
    def models(self) -> list[Transformer]:
        """The models of our own engine; empty with another one."""
        return [bundle.model for bundle in self.bundles]

    @property
    def device(self) -> torch.device:
        """Where the work is done."""
        return self.engine.device

    @property
    def max_positions(self) -> int | None:
        """Longest source and output in tokens that the engine can hold; None = any."""
        return self.engine.max_positions

    def translate(
        self,
        lines: Iterable[str],
        options: TranslateOptions | None = None,
        prefixes: Iterable[str] | None = None,
    ) -> list[str]:
        """The best translation of each line; see `translate_lines`."""
        return [found.text for found in self.translate_lines(lines, options, prefixes)]

    def translate_lines(
        self,
        lines: Iterable[str],
        options: TranslateOptions | None = None,
        prefixes: Iterable[str] | None = None,
    ) -> Iterator[Translation]:
        """Yield one `Translation` per line, in order, window by window.

        prefixes: per line, what its translation must begin with (white space at its end is
        dropped: the next token brings its own). DataError when there are not as many as lines.
        """
        options = self.completed(options or TranslateOptions())
        queue, search = numbered_lines(lines, prefixes), self.engine.searcher()
        while window := list(itertools.islice(queue, options.lines_ahead())):
            yield from self._window(window, options, search)

    def completed(self, options: TranslateOptions) -> TranslateOptions:
        """The options with this model's symbols and source limit, as they are used.

        Ids that hold a line end and tags are forbidden. ConfigError for what the engine cannot do,
        and for a tag that the model was not trained with.
        """
        tag_ids(self.members, options.tag)
        own = self.target_tokenizer
        forbidden = {*options.forbidden, PAD_ID, BOS_ID, *own.newline_ids, *own.tags.values()}
        completed = replace(
            options,
            forbidden=tuple(sorted(forbidden)),
            max_source_length=self._source_limit(options.max_source_length),
            pad=PAD_ID,
            bos=BOS_ID,
            eos=EOS_ID,
        )
        self.engine.check(completed)
        return completed

    def _source_limit(self, wanted: int | None) -> int:
        """Subwords read of a source, EOS included; ConfigError for more than can be read."""
        most = self.max_positions
        limit = wanted or most or max(DEFAULT_MAX_SOURCE, self._training_length())
        if most is not None and limit > most:
            raise ConfigError(f"max_source_length is {limit}, but the model has {most} positions.")
        return limit

    @property
    def needed_tag(self) -> str | None:
        """A tag for text of which nothing is known, where there must be one: the first it knows."""
        return needed_tag(self.members[0].meta, self.members[0].path)

    def encode_sources(self, texts: Sequence[str], tag: str | None = None) -> list[list[int]]:
        """The ids of source texts, with the tag before each, without EOS.

        ConfigError for a tag that the model was not trained with, or none where it needs one.
        """
        first = tag_ids(self.members, tag)
        return [[*first, *ids] for ids in self.source_tokenizer.encode_batch(list(texts))]

    # ---- one window ---------------------------------------------------------------------------

    def _window(
        self, window: list[Line], options: TranslateOptions, search: Search
    ) -> list[Translation]:
        units = self._units(window, options)
        found: list[list[list[Hypothesis]]] = [[] for _ in window]
        cut = {unit.place for unit in units if unit.cut}
        lengths = [len(unit.row.ids) for unit in units]
        order = sorted(range(len(units)), key=lambda i: -lengths[i])
        tokens = options.sentence_tokens(self.device)
        results: list[list[Hypothesis]] = [[] for _ in units]
        with self.engine.ready():
            for batch in batches(order, lengths, tokens=tokens, size=options.batch_size):
                answers = in_halves(
                    lambda part: search([unit.row for unit in part], options),
                    [units[i] for i in batch],
                    lambda unit: _too_large(unit, options),
                )
                for i, hypotheses in zip(batch, answers, strict=True):
                    results[i] = hypotheses
        for unit, hypotheses in zip(units, results, strict=True):
            found[unit.place].append(hypotheses)
        return [
            self._translation(line, parts, place in cut, options)
            for place, (line, parts) in enumerate(zip(window, found, strict=True))
        ]

    def _units(self, window: list[Line], options: TranslateOptions) -> list[_Unit]:
        """What is to be searched: nothing for a blank line, several parts for a split one."""
        places = [place for place, line in enumerate(window) if line.text.strip()]
        encoded = self.source_tokenizer.encode_batch([window[place].text for place in places])
        assert options.max_source_length is not None, "the options are not completed"
        first = tag_ids(self.members, options.tag)
        longest = math.inf
        if options.split_long:
            longest = min(self._training_length(), options.max_source_length) - len(first) - 1
        units = []
        for place, ids in zip(places, encoded, strict=True):
            line = window[place]
            parts = [ids]
            if len(ids) > longest:
                parts = split_sentences(line.text, self.source_tokenizer, int(longest))
            prefix = self.target_tokenizer.encode(line.prefix.rstrip()) if line.prefix else []
            for number, part in enumerate(parts):
                kept, shorter = cut_ids([*first, *part], options.max_source_length)
                key = line.number + (number << 40)  # parts of a line draw their own numbers
                begin = prefix if number == 0 else []
                units.append(_Unit(place, line.number, Row(key, kept, begin), shorter))
        return units

    def _training_length(self) -> int:
        """Subwords, EOS included, of the longest sentences that all members were trained on."""
        lengths = [bundle.meta.get("max_length") for bundle in self.members]
        return min((n for n in lengths if isinstance(n, int)), default=DEFAULT_MAX_SOURCE)

    # ---- ids to text --------------------------------------------------------------------------

    def _translation(
        self,
        line: Line,
        parts: list[list[Hypothesis]],
        cut: bool,
        options: TranslateOptions,
    ) -> Translation:
        if not parts:
            nothing = TranslatedHypothesis("", 0.0, 0.0, True, ())
            return Translation(line.number, line.text, (nothing,), blank=True)
        if len(parts) == 1:
            found = [self._text(hypothesis) for hypothesis in parts[0]]
        else:
            found = [self._joined([part[0] for part in parts], options)]
        return Translation(
            line.number,
            line.text,
            tuple(found),
            source_cut=cut,
            hit_limit=not found[0].finished,
            looped=has_loop(found[0].tokens),
            pieces=len(parts),
        )

    def _text(self, hypothesis: Hypothesis) -> TranslatedHypothesis:
        text = one_line(self.target_tokenizer.decode(hypothesis.tokens))
        return TranslatedHypothesis(
            text, hypothesis.score, hypothesis.ranked, hypothesis.finished, hypothesis.tokens
        )

    def _joined(
        self, parts: Sequence[Hypothesis], options: TranslateOptions
    ) -> TranslatedHypothesis:
        """The outputs of the parts of a line as one; the score is the sum, each EOS counted."""
        space = sentence_space(tag_lang(options.tag, self.members[0].meta))
        score = sum(part.score for part in parts)
        length = sum(len(part.tokens) + part.finished for part in parts)
        return TranslatedHypothesis(
            space.join(self._text(part).text.strip() for part in parts),
            score,
            options.ranked(score, length, finished=False),
            all(part.finished for part in parts),
            tuple(itertools.chain.from_iterable(part.tokens for part in parts)),
        )

    # ---- forced scoring -----------------------------------------------------------------------

    def score(
        self,
        pairs: Iterable[tuple[str, str]],
        *,
        batch_tokens: int = DEFAULT_BATCH_TOKENS,
        max_source_length: int | None = None,
        each: bool = False,
        tag: str | None = None,
    ) -> list[ForcedScore]:
        """Log-probability of each target given its source, EOS included, in their order.

        each: that of every token, too. tag: what is put before each source, as in translation, and
        is not scored. batch_tokens bounds rows x longest of each side. A source
        longer than `max_source_length` (None: as in translation), and a target longer than learned
        positions, is cut and marked.
        """
        sources, targets = [], []
        for source, target in sentence_pairs(pairs):
            sources.append(source)
            targets.append(target)
        limit = self._source_limit(max_source_length)
        left = [cut_ids(ids, limit) for ids in self.encode_sources(sources, tag)]
        right = [
            cut_ids(ids, self.max_positions) for ids in self.target_tokenizer.encode_batch(targets)
        ]
        items = [(s, t) for (s, _), (t, _) in zip(left, right, strict=True)]
        cut = [a or b for (_, a), (_, b) in zip(left, right, strict=True)]
        if not each:
            sums = self.score_ids(items, batch_tokens=batch_tokens)
            rows = zip(sums, items, cut, strict=True)
            return [ForcedScore(total, len(t), shorter) for total, (_, t), shorter in rows]
        found = self._forced(self.engine.token_scores, items, batch_tokens)
        return [
            ForcedScore(sum(row), len(t), shorter, tuple(t), tuple(row))
            for row, (_, t), shorter in zip(found, items, cut, strict=True)
        ]

    def score_ids(
        self,
        items: Sequence[Item],
        *,
        batch_tokens: int = DEFAULT_BATCH_TOKENS,
    ) -> list[float]:
        """Log-probability of each (source ids with EOS, target ids), for `score` and for tests.

        A target that does not end with EOS is scored as it stands, like an output that was cut.
        """
        return self._forced(self.engine.score, items, batch_tokens)

    def _forced(
        self,
        work: Callable[[Sequence[Item]], list[Result]],
        items: Sequence[Item],
        batch_tokens: int,
    ) -> list[Result]:
        """What the engine's `work` gives for each item, in batches of like lengths."""
        longest = [max(len(source), len(target)) for source, target in items]
        order = sorted(range(len(items)), key=lambda i: -longest[i])
        results: dict[int, Result] = {}
        with self.engine.ready():
            for batch in batches(order, longest, tokens=batch_tokens):
                found = in_halves(
                    lambda part: work([items[i] for i in part]), batch, _pair_too_large
                )
                results.update(zip(batch, found, strict=True))
        return [results[i] for i in range(len(items))]


def saved_decoding(meta: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The decode section that a model was trained with, of its meta.json; defaults without one."""
    values = meta.get("decode")
    try:
        return DecodeConfig.model_validate({} if values is None else values).model_dump()
    except ValidationError:
        raise CheckpointError(f"{path}: the decode section of meta.json is damaged.") from None


def _too_large(unit: _Unit, options: TranslateOptions) -> DataError:
    lower = ["--max-source-length"]
    if options.sample and options.nbest > 1:  # each draw is a row
        lower = ["--candidates", "--nbest", *lower]
    elif not options.sample and options.beam > 1:
        lower = ["--beam", *lower]
    return DataError(
        f"Input line {unit.line} ({len(unit.row.ids)} subwords) does not fit into memory, not even "
        f"alone. Lower {' or '.join(lower)}, or translate it in parts with --split-long."
    )


def _pair_too_large(index: int) -> DataError:
    return DataError(
        f"Pair {index + 1} does not fit into memory, not even alone, to be scored. Lower "
        "--max-source-length."
    )
