"""BLEU, chrF and TER by sacreBLEU, with the signature that says how each number was made.

sacreBLEU does the arithmetic, and the figures are those of its command line; what its Python
interface leaves to the caller is checked here first: it pairs hypotheses and references with
`zip`, so that a short file scores like a full one. Text is scored as it is: case-sensitive and
detokenised, against the untouched reference. TER ignores case, as in sacreBLEU's command (its
signature says so).

Price per 1000 sentences: BLEU 0.1 s, chrF 0.2 s, TER some 3 s (more for long, bad hypotheses);
1000 bootstrap resamples of all three add a second, and 100 MB for the time they take.
"""

from __future__ import annotations

import contextlib
import math
import os
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sacrebleu.metrics.base import Metric
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER
from sacrebleu.significance import PairedTest

from mttrain.errors import ConfigError, DataError, MissingDependency, unequal_lines
from mttrain.languages import CHINESE, JAPANESE, KOREAN, base_code

METRICS = ("bleu", "chrf", "ter")
SEED = 12345  # sacreBLEU's own default
_BY_LANGUAGE = {
    **dict.fromkeys(CHINESE, "zh"),
    **dict.fromkeys(JAPANESE, "ja-mecab"),
    **dict.fromkeys(KOREAN, "ko-mecab"),
}
_MECAB = ("ja-mecab", "ko-mecab")  # the others that need a package are models of sentencepiece
# Scripts written without spaces: the words that 13a looks for are whole sentences there.
_UNSPACED = ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN")
_WORD_TOKENIZERS = ("13a", "intl", "none")
_TOKENIZED_LINES = 100  # sacreBLEU's own limit for its hint
_SAMPLE = 500  # lines looked at to tell the script


@dataclass(frozen=True)
class Score:
    """One metric over one test set; `ci`: mean and half width of the 95 % interval, if asked."""

    name: str  # "BLEU", "chrF" or "TER"
    value: float  # 0 to 100; for TER lower is better, and it may exceed 100
    signature: str
    ci: tuple[float, float] | None = None
    tokenizer: str | None = None  # of BLEU
    detail: str = ""  # of BLEU: precisions, brevity penalty, lengths

    def text(self) -> str:
        """One line in the form of sacreBLEU's command, such as `BLEU|nrefs:1|... = 34.2 ...`."""
        spread = f" (μ = {self.ci[0]:.2f} ± {self.ci[1]:.2f})" if self.ci else ""
        detail = f" {self.detail}" if self.detail else ""
        return f"{score_label(self.name)}|{self.signature} = {self.value:.2f}{spread}{detail}"

    def __str__(self) -> str:
        return self.text()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"ci": _interval(self.ci) if self.ci else None}


@dataclass(frozen=True)
class Comparison:
    """A system against a baseline on the same lines: paired bootstrap resampling (Koehn 2004)."""

    name: str
    baseline: float
    system: float
    p_value: float  # of a difference as large as this between equally good systems
    baseline_ci: tuple[float, float]  # (mean, half width) of the 95 % interval
    system_ci: tuple[float, float]
    signature: str

    @property
    def delta(self) -> float:
        return self.system - self.baseline

    def text(self) -> str:
        """One line: the two scores, their difference and its p-value."""
        sure = "significant" if self.p_value < 0.05 else "not significant"
        return (
            f"{score_label(self.name)}|{self.signature} : baseline {self.baseline:.2f} "
            f"(μ = {self.baseline_ci[0]:.2f} ± {self.baseline_ci[1]:.2f}), system "
            f"{self.system:.2f} (μ = {self.system_ci[0]:.2f} ± {self.system_ci[1]:.2f}), "
            f"difference {self.delta:+.2f}, p = {self.p_value:.4f} ({sure} at 0.05)"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        spreads = {name: _interval(getattr(self, name)) for name in ("baseline_ci", "system_ci")}
        return asdict(self) | spreads | {"delta": self.delta}


def _interval(spread: tuple[float, float]) -> dict[str, float]:
    """With names: two bare numbers read like the ends of the interval."""
    return {"mean": spread[0], "half_width": spread[1]}


def score_label(name: str) -> str:
    """How a score is named beside its signature: sacreBLEU's name tells chrF's beta."""
    return "chrF2" if name == "chrF" else name


def bleu_tokenizer(lang: str | None) -> str:
    """sacreBLEU's tokenizer for a target language such as "de", "zh-CN" or "jpn_Jpan"."""
    return _BY_LANGUAGE.get(base_code(lang), "13a")


def perplexity(nll: float) -> float:
    """exp of a mean negative log-likelihood in nats; infinite where that overflows."""
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf


def require_tokenizer(name: str) -> None:
    """Raise now what `score_corpus` would raise for this tokenizer: unknown, or not to be had."""
    _build("bleu", name, False)


def score_corpus(
    hyps: Sequence[str],
    refs: Sequence[Sequence[str]],
    *,
    lang: str | None = None,
    tokenize: str | None = None,
    lowercase: bool = False,
    metrics: Sequence[str] = METRICS,
    bootstrap: int = 0,
    seed: int = SEED,
) -> list[Score]:
    """Score hypotheses against one list of lines per reference file, in the order of `metrics`.

    BLEU's tokenizer is `tokenize`, or that of the target language `lang`. With `bootstrap` (number
    of resamples) a 95 % interval is added. DataError when there is nothing to score or the numbers
    of lines differ; ConfigError and MissingDependency for a tokenizer that cannot be had.
    """
    _check_lines(hyps, refs)
    tokenizer = tokenize or bleu_tokenizer(lang)
    scores = []
    for name in metrics:
        metric = _build(name, tokenizer, lowercase)
        with _sacrebleu_seed(seed):
            result = metric.corpus_score(hyps, refs, n_bootstrap=max(bootstrap, 1))
        bleu = name == "bleu"
        scores.append(
            Score(
                name={"bleu": "BLEU", "chrf": "chrF", "ter": "TER"}[name],
                value=float(result.score),
                signature=str(metric.get_signature()),
                ci=(float(result._mean), float(result._ci)) if bootstrap > 1 else None,
                tokenizer=tokenizer if bleu else None,
                detail=result._verbose if bleu else "",
            )
        )
    return scores


def compare_systems(
    baseline: Sequence[str],
    hyps: Sequence[str],
    refs: Sequence[Sequence[str]],
    *,
    lang: str | None = None,
    tokenize: str | None = None,
    lowercase: bool = False,
    metrics: Sequence[str] = METRICS,
    samples: int = 1000,
    seed: int = SEED,
) -> list[Comparison]:
    """Is the difference of two systems more than chance? Paired bootstrap, both on the same lines.

    Arguments and errors as for `score_corpus`.
    """
    _check_lines(baseline, refs, "The baseline")
    _check_lines(hyps, refs)
    tokenizer = tokenize or bleu_tokenizer(lang)
    built = {name: _build(name, tokenizer, lowercase) for name in metrics}
    with _sacrebleu_seed(seed):
        test = PairedTest(
            [("baseline", baseline), ("system", hyps)], built, refs, "bs", n_samples=samples
        )
        signatures, table = test()
    results: dict[str, Any] = table
    return [
        _comparison(name, *results[name], signature=str(signature))
        for name, signature in signatures.items()
    ]


def _comparison(name: str, baseline: Any, system: Any, *, signature: str) -> Comparison:
    """From sacreBLEU's two results; it calls equal scores significant, where p must be 1."""
    equal = system.score == baseline.score
    return Comparison(
        name="chrF" if name == "chrF2" else name,
        baseline=float(baseline.score),
        system=float(system.score),
        p_value=1.0 if equal else float(system.p_value),
        baseline_ci=(float(baseline.mean), float(baseline.ci)),
        system_ci=(float(system.mean), float(system.ci)),
        signature=signature,
    )


def _check_lines(
    hyps: Sequence[str], refs: Sequence[Sequence[str]], who: str = "The hypothesis"
) -> None:
    if not refs or any(isinstance(lines, str) for lines in refs):
        raise DataError("Give the references as one list of lines for each reference file.")
    for number, lines in enumerate(refs, 1):
        if len(lines) != len(hyps):
            name = f"reference {number}" if len(refs) > 1 else "the reference"
            raise unequal_lines(who, len(hyps), name, len(lines))
    if not hyps:
        raise DataError("There are no lines to score: hypothesis and reference are empty.")


def _build(name: str, tokenizer: str, lowercase: bool) -> Metric:
    """A metric with the settings of sacreBLEU's command line, whose scores are Python's numbers.

    sacreBLEU's own are numpy's or Python's by chance, and its mean of resamples, of which some
    score nothing, then fails.
    """
    metric = _new_metric(name, tokenizer, lowercase)
    compute = metric._compute_score_from_stats

    def plain(stats: list[Any]) -> Any:
        result = compute(stats)
        result.score = float(result.score)
        return result

    metric._compute_score_from_stats = plain  # type: ignore[method-assign]
    return metric


def _new_metric(name: str, tokenizer: str, lowercase: bool) -> Metric:
    if name == "chrf":
        return CHRF(lowercase=lowercase)
    if name == "ter":
        return TER()
    if name != "bleu":
        raise ConfigError(f"Unknown metric {name!r}; there are {', '.join(METRICS)}.")
    if tokenizer not in BLEU.TOKENIZERS:
        choices = ", ".join(BLEU.TOKENIZERS)
        raise ConfigError(f"Unknown BLEU tokenizer {tokenizer!r}; there are {choices}.")
    try:
        # force: its hint on tokenised text goes to a logger; `tokenized_warning` gives it instead.
        return BLEU(lowercase=lowercase, tokenize=tokenizer, force=True)
    except (ImportError, RuntimeError, OSError, SystemExit) as error:
        raise _no_tokenizer(tokenizer, error) from None


def _no_tokenizer(name: str, error: BaseException) -> MissingDependency:
    """What this tokenizer lacks: its package, or (sentencepiece's) the model it downloads."""
    other = "or choose another tokenizer, such as char."
    if isinstance(error, ImportError) or name in _MECAB:
        package = "'mttrain[zh_ja_ko]'" if name in _MECAB else "sentencepiece"
        return MissingDependency(
            f"The BLEU tokenizer {name} needs a package that is not installed: pip install "
            f"{package}, {other}"
        )
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
    return MissingDependency(
        f"The BLEU tokenizer {name} needs a model that sacreBLEU could not download: "
        f"{' '.join(str(reason).split())}. Try again with a network, {other}"
    )


@contextlib.contextmanager
def _sacrebleu_seed(seed: int) -> Iterator[None]:
    """sacreBLEU takes the seed of its resampling from the environment, and only from there."""
    before = os.environ.get("SACREBLEU_SEED")
    os.environ["SACREBLEU_SEED"] = str(seed)
    try:
        yield
    finally:
        if before is None:
            del os.environ["SACREBLEU_SEED"]
        else:
            os.environ["SACREBLEU_SEED"] = before


# ---- warnings ---------------------------------------------------------------------------------


def cjk_warning(texts: Iterable[str], tokenizer: str) -> str | None:
    """A warning when text without spaces between words is to be scored by a tokenizer for words."""
    if tokenizer not in _WORD_TOKENIZERS:
        return None
    letters = unspaced = 0
    for _, text in zip(range(_SAMPLE), texts, strict=False):
        for character in filter(str.isalpha, text):
            letters += 1
            unspaced += unicodedata.name(character, "").startswith(_UNSPACED)
    if 2 * unspaced <= letters:
        return None
    return (
        f"Most letters belong to scripts written without spaces, where the BLEU tokenizer "
        f"{tokenizer} takes a sentence for one word; give the target language (zh, ja) or the "
        "tokenizer char."
    )


def tokenized_warning(hyps: Sequence[str]) -> str | None:
    """sacreBLEU's hint on tokenised text: 100 lines, or most, that end in a space and a period."""
    count = sum(line.endswith(" .") for line in hyps)
    if count < _TOKENIZED_LINES and 2 * count <= len(hyps):
        return None
    return (
        f"{count} of {len(hyps)} hypothesis lines end in a tokenized period (' .'): scores are "
        "meant for detokenized text, and others cannot compare with these."
    )
