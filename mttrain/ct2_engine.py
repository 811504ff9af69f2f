"""CTranslate2 as the engine behind a translator: what it finds, made to mean what ours means.

The library searches; limits, ranking and scores are settled here, because there they are other
things. One call has one output limit for all its lines: it gets the longest, and a line that went
beyond its own is searched again with that (greedy output is just cut there). Hypotheses are
returned with EOS and ranked again as ours are: sum / length^A, EOS counted, finished ones first.
The library masks forbidden tokens before the softmax, which changes every score; so nothing is
forbidden at first, and only lines in which a forbidden token came up are searched again with a
mask. Whatever was masked or forced is scored by a forced pass, without any mask.

What has no equal is refused by name: sampling keyed by line, ensembles, and, with a beam,
`min_length` and `no_repeat_ngram`, whose masks would weigh hypotheses in another way.

Left to differ: float rounding; and with a beam and a prefix, the library gives up one hypothesis
where the end symbol may follow right after the prefix.

Price: the tokens pass through Python as strings; lines searched twice are few.

Shapes: none; this module is plain Python around the library.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from mttrain.ct2_files import FORMAT, ExportedModel, require_ctranslate2, verified
from mttrain.engine import Item, Row, Search
from mttrain.errors import CheckpointError, ConfigError, DataError
from mttrain.machine import prepare_cpu
from mttrain.search import Hypothesis
from mttrain.searchstep import Rules
from mttrain.segments import TranslateOptions
from mttrain.tokenizer import EOS_ID
from mttrain.translator import Translator

Verified = tuple[ExportedModel, tuple[list[str], list[str]]]
"""What an exported directory says of its model, and its vocabularies of both sides by id."""

# An exponent that divides by 1: at exactly 0 the library stops a search by another rule.
_NO_PENALTY = 1e-30
# Below this a hypothesis is none: the library fills beams that a prefix leaves empty with -1e10.
_NO_HYPOTHESIS = -1e7
# --precision -> the library's name; auto is fp32 on a CPU, else bf16 where the device has it.
_TYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "int8": "int8"}
_EXACT = ("float32", "int8_float32")  # types whose log-probabilities are float32 on a GPU too


class Ct2Engine:
    """A loaded CTranslate2 model whose vocabularies are those of our tokenizers."""

    name = FORMAT

    def __init__(
        self,
        library: Any,
        vocabularies: tuple[Sequence[str], Sequence[str]],
        device: torch.device,
        positions: int,
        learned: bool,
    ) -> None:
        """library: a ctranslate2.Translator; positions: the longest source and output it holds;
        learned: the model itself has no more."""
        self._library = library
        self._source, self._target = vocabularies
        self._ids = {token: index for index, token in enumerate(self._target)}
        self.device, self.positions = device, positions
        self.max_positions = positions if learned else None
        self.compute_type: str = library.compute_type
        # Whether sums of a search are float32; else a forced pass gives better ones.
        self.exact = device.type == "cpu" or self.compute_type in _EXACT

    # ---- the Engine protocol ------------------------------------------------------------------

    def check(self, options: TranslateOptions) -> None:
        """Refuse what the library cannot do, or does otherwise."""
        refuse_options(options)
        source = options.max_source_length or 0
        longest = max(source, options.max_length or 3 * source + 20)
        if self.max_positions is None and longest > self.positions:
            raise ConfigError(
                f"max_source_length {source} with max_length {options.max_length or 'not set'} may "
                f"need {longest} positions, but this CTranslate2 directory has {self.positions}; "
                "lower them, or use the torch engine."
            )
        if 2 * options.beam > len(self._target) - len(options.forbidden):
            raise ConfigError(
                f"beam {options.beam} is more than half of the vocabulary, which CTranslate2 "
                "cannot search; lower it, or use the torch engine."
            )

    def ready(self) -> AbstractContextManager[None]:
        """Nothing is to be prepared."""
        return contextlib.nullcontext()

    def searcher(self) -> Search:
        """The search of one batch."""
        return self._search

    def score(self, items: Sequence[Item]) -> list[float]:
        """Log-probability of each target, of a forced pass; without EOS it is scored as it is."""
        return [sum(each) for each in self.token_scores(items)]

    def token_scores(self, items: Sequence[Item]) -> list[list[float]]:
        """That of each token."""
        sources = [[self._source[index] for index in source] for source, _ in items]
        ended = [len(target) > 0 and target[-1] == EOS_ID for _, target in items]
        targets = [
            [self._target[index] for index in (target[:-1] if end else target)]
            for (_, target), end in zip(items, ended, strict=True)
        ]
        if max(map(len, [*sources, *targets])) > self.positions:
            raise DataError(
                f"A line has more subwords than the {self.positions} positions of this CTranslate2 "
                "directory; score it with the torch engine."
            )
        with _memory_errors():
            found = self._library.score_batch(sources, targets, max_input_length=0)
        # One more than the target has tokens: EOS.
        return [
            list(result.log_probs if end else result.log_probs[:-1])
            for result, end in zip(found, ended, strict=True)
        ]

    # ---- searching ----------------------------------------------------------------------------

    def _search(self, rows: Sequence[Row], options: TranslateOptions) -> list[list[Hypothesis]]:
        limits = Rules(
            options,
            torch.empty(0),
            len(self._target),
            [len(row.ids) - 1 for row in rows],
            [row.prefix for row in rows],
            self.positions,
        ).limits
        found: list[list[Hypothesis]] = [[] for _ in rows]
        # The library treats a line without a prefix otherwise beside one that has one.
        for prefixed in (False, True):
            places = [i for i, row in enumerate(rows) if bool(row.prefix) == prefixed]
            if places:
                part = _Batch(self, [rows[i] for i in places], [limits[i] for i in places], options)
                for place, hypotheses in zip(places, part.found(), strict=True):
                    found[place] = hypotheses
        return found

    def find(
        self,
        rows: Sequence[Row],
        options: TranslateOptions,
        limit: int,
        *,
        masked: bool,
        all_at_limit: bool = False,
    ) -> list[list[tuple[tuple[int, ...], float]]]:
        """Ids with EOS (without it: cut at the limit) and sums, for each row, of one call.

        masked: forbid the forbidden tokens. all_at_limit: return all that there is at the limit,
        for rows known to reach it.
        """
        beam = options.beam
        wide = all_at_limit and beam > 1
        penalty = options.length_penalty or _NO_PENALTY
        size = len(self._target)
        forbidden = [[self._target[i]] for i in options.forbidden if 0 <= i < size]
        with _memory_errors():
            results = self._library.translate_batch(
                [[self._source[index] for index in row.ids] for row in rows],
                target_prefix=self._prefixes(rows),
                beam_size=beam,
                num_hypotheses=2 * beam if wide else beam,
                patience=2 if wide else 1,
                length_penalty=penalty,
                max_decoding_length=limit,
                min_decoding_length=min(options.min_length, limit),
                no_repeat_ngram_size=options.no_repeat_ngram,
                suppress_sequences=forbidden if masked else None,
                max_input_length=0,
                return_end_token=True,
                return_scores=True,
            )
        return [
            [
                (tuple(self._ids[token] for token in tokens), score * len(tokens) ** penalty)
                for tokens, score in zip(result.hypotheses, result.scores, strict=True)
            ]
            for result in results
        ]

    def _prefixes(self, rows: Sequence[Row]) -> list[list[str]] | None:
        if not rows[0].prefix:
            return None
        return [[self._target[index] for index in row.prefix] for row in rows]


@contextlib.contextmanager
def _memory_errors() -> Iterator[None]:
    """No memory left on a GPU is a MemoryError, as on a CPU: then the batch is halved."""
    try:
        yield
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
        raise MemoryError(str(error)) from None


class _Batch:
    """The hypotheses of rows that all have a prefix, or all have none."""

    def __init__(
        self,
        engine: Ct2Engine,
        rows: Sequence[Row],
        limits: Sequence[int],
        options: TranslateOptions,
    ) -> None:
        self.engine, self.rows, self.limits, self.options = engine, rows, limits, options
        self.raw: list[list[tuple[tuple[int, ...], float]]] = [[] for _ in rows]
        # What is masked or forced has another score there.
        altered = (
            options.min_length > 0
            or options.no_repeat_ngram > 0
            or bool(rows[0].prefix)
            or not engine.exact
        )
        self.rescored = [altered] * len(rows)

    def found(self) -> list[list[Hypothesis]]:
        """1 to nbest hypotheses for each row, best first."""
        places = list(range(len(self.rows)))
        self._run(places, max(self.limits), masked=False)
        self._repair(places, masked=False)
        free = set(self.options.forbidden)
        bad = [i for i in places if self._holds(i, free)]
        if bad:
            self._run(bad, max(self.limits[i] for i in bad), masked=True)
            self._repair(bad, masked=True)
            for place in bad:
                self.rescored[place] = True
        self._rescore()
        return [self._ranked(raw) for raw in self.raw]

    def _holds(self, place: int, forbidden: set[int]) -> bool:
        """Whether a forbidden token was produced; in the prefix it was asked for by name."""
        start = len(self.rows[place].prefix)
        return any(not forbidden.isdisjoint(tokens[start:]) for tokens, _ in self.raw[place])

    def _run(
        self, places: Sequence[int], limit: int, *, masked: bool, all_at_limit: bool = False
    ) -> None:
        rows = [self.rows[place] for place in places]
        answers = self.engine.find(
            rows, self.options, limit, masked=masked, all_at_limit=all_at_limit
        )
        for place, answer in zip(places, answers, strict=True):
            self.raw[place] = [(ids, score) for ids, score in answer if score > _NO_HYPOTHESIS]

    def _repair(self, places: Sequence[int], *, masked: bool) -> None:
        """Give the rows that went beyond their own limit, or reached it, what they should have."""
        reached = [i for i in places if self._reached(i)]
        if self.options.beam == 1:
            for place in reached:
                (tokens, _), *_ = self.raw[place]
                if len(tokens) > self.limits[place] or tokens[-1] != EOS_ID:
                    self.raw[place] = [(tokens[: self.limits[place]], 0.0)]
                    self.rescored[place] = True
            return
        # A search that ended before the limit is the same with any larger one. One that did not is
        # made again, with its own; there the library ranks what was cut among what has ended, and
        # only the whole list is sure to hold what has ended.
        for limit in sorted({self.limits[i] for i in reached}):
            mine = [i for i in reached if self.limits[i] == limit]
            self._run(mine, limit, masked=masked, all_at_limit=True)

    def _reached(self, place: int) -> bool:
        limit = self.limits[place]
        return any(len(ids) > limit or ids[-1] != EOS_ID for ids, _ in self.raw[place])

    def _rescore(self) -> None:
        """Scores of forced passes, where the library's own are not the model's."""
        items, spots = [], []
        for place, raw in enumerate(self.raw):
            if self.rescored[place]:
                spots += [(place, at) for at in range(len(raw))]
                items += [(self.rows[place].ids, ids) for ids, _ in raw]
        batch = len(self.rows)  # as many as fitted into memory before
        for start in range(0, len(items), batch):
            scores = self.engine.score(items[start : start + batch])
            for (place, at), score in zip(spots[start : start + batch], scores, strict=True):
                self.raw[place][at] = (self.raw[place][at][0], score)

    def _ranked(self, raw: Sequence[tuple[tuple[int, ...], float]]) -> list[Hypothesis]:
        """As our search ranks them: finished before unfinished, then by sum / length^A."""
        found = []
        for ids, score in raw:
            finished = bool(ids) and ids[-1] == EOS_ID
            tokens = ids[:-1] if finished else ids
            ranked = self.options.ranked(score, len(tokens), finished)
            found.append(Hypothesis(tokens, score, ranked, finished))
        found = sorted(found, key=lambda h: (not h.finished, -h.ranked))[: self.options.nbest]
        return found or [Hypothesis((), 0.0, 0.0, False)]  # nothing is a number: an overflow


# ---- what is refused --------------------------------------------------------------------------


def refuse_options(options: TranslateOptions) -> None:
    """ConfigError for what CTranslate2 cannot do as it is meant here; no model is needed for it."""
    if options.sample:
        raise ConfigError(
            "sample does not work with CTranslate2, whose draws would depend on the batch; remove "
            "it, or use the torch engine."
        )
    for name, value in (
        ("min_length", options.min_length),
        ("no_repeat_ngram", options.no_repeat_ngram),
    ):
        if value and options.beam > 1:
            raise ConfigError(
                f"{name} with beam {options.beam} is not the same in CTranslate2, which raises the "
                "probabilities of what it does not forbid; use beam 1, or the torch engine."
            )


# ---- loading ----------------------------------------------------------------------------------


def load_exported(
    path: str | Path,
    *,
    device: str = "auto",
    precision: str = "auto",
    threads: int | None = None,
    compute_type: str | None = None,
) -> Translator:
    """A translator around an exported directory, whose files are verified first.

    CheckpointError for a directory that is none, or is damaged; the rest as `load_verified`.
    """
    folder = Path(path)
    choose_compute(require_ctranslate2(), device, precision)
    return load_verified(
        folder,
        verified(folder),
        device=device,
        precision=precision,
        threads=threads,
        compute_type=compute_type,
    )


def load_verified(
    folder: Path,
    content: Verified,
    *,
    device: str = "auto",
    precision: str = "auto",
    threads: int | None = None,
    compute_type: str | None = None,
) -> Translator:
    """A translator around a directory with this verified content.

    precision: auto is the type of the weights as they are stored, or, of float32 weights, bf16 on
    a GPU that has it; compute_type: the library's own name of one, instead of that. ConfigError for
    a device or a precision that this build of CTranslate2 has not.
    """
    library = require_ctranslate2()
    model, vocabularies = content
    facts = model.meta["export"]
    chosen, kind = choose_compute(library, device, precision)
    if precision == "auto" and facts["quantization"] != "float32":
        kind = "default"
    prepare_cpu(threads)
    place = {} if chosen.type == "cpu" else {"device_index": chosen.index or 0}
    try:
        loaded = library.Translator(
            str(folder),
            device=chosen.type,
            compute_type=compute_type or kind,
            intra_threads=torch.get_num_threads(),
            **place,
        )
    except (RuntimeError, ValueError) as error:
        text = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{folder}: CTranslate2 cannot load it: {text}") from None
    engine = Ct2Engine(loaded, vocabularies, chosen, facts["positions"], facts["learned_positions"])
    return Translator.with_engine(engine, model)


def choose_compute(library: Any, device: str, precision: str) -> tuple[torch.device, str]:
    """Device and compute type of these options, or ConfigError for what the library has not."""
    count = library.get_cuda_device_count()
    if device == "auto":
        device = "cuda" if count else "cpu"
    kind, _, number = device.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdecimal()):
        raise ConfigError(
            f"device {device!r} is unknown to the ctranslate2 engine; use auto, cpu or cuda"
        )
    if kind == "cuda" and int(number or 0) >= count:
        raise ConfigError(
            f"device {device!r}: this CTranslate2 sees {count} CUDA devices; use auto or cpu, or "
            "the torch engine"
        )
    chosen = torch.device("cpu") if kind == "cpu" else torch.device("cuda", int(number or 0))
    known = library.get_supported_compute_types(kind, *([chosen.index] if number else []))
    if precision == "auto":
        return chosen, "bfloat16" if kind == "cuda" and "bfloat16" in known else "float32"
    if _TYPES[precision] not in known:
        names = ", ".join(name for name, other in _TYPES.items() if other in known)
        raise ConfigError(
            f"precision {precision}: CTranslate2 has no {_TYPES[precision]} on this {kind} device; "
            f"use one of {names}"
        )
    return chosen, _TYPES[precision]
