"""The settings of the text: which files, which of their pairs are used, and the vocabulary."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from mttrain.settings import (
    Language,
    NotNegative,
    OneOrMany,
    Problem,
    Section,
    Share,
    Text,
    Whole,
    as_tuple,
)
from mttrain.tags import TAG_PATTERN, language_tag, listed, name_problem, note_tag

Fields = tuple[int | str, int | str]
PairsKind = Literal["tsv", "jsonl", "tmx", "sacrebleu"]
TEST_SET = "sacrebleu:"
PAIRS_FORMS = f"FILE.tsv, FILE.jsonl, FILE.tmx (.gz or not) and {TEST_SET}NAME"
_KINDS: dict[str, PairsKind] = {"tsv": "tsv", "jsonl": "jsonl", "ndjson": "jsonl", "tmx": "tmx"}


def pairs_kind(name: str) -> PairsKind | None:
    """What kind of corpus a `pairs` value names, by its form alone; None: no known one."""
    if name.startswith(TEST_SET) and len(name) > len(TEST_SET):
        return "sacrebleu"
    found = re.search(r"[^/]\.(\w+?)(\.gz)?$", name.lower())
    return _KINDS.get(found[1]) if found else None


def _refuse(message: str) -> PydanticCustomError:
    return PydanticCustomError("setting", "{message}", {"message": message})


def _tag(value: object) -> object:
    if value is None or value is True:
        return value
    if not isinstance(value, str):
        raise _refuse("wants a name, or true for the tag of the target language")
    problem = name_problem(value)
    if problem is not None:
        raise _refuse(problem)
    return value


def _temperature(value: object) -> object:
    if not isinstance(value, int | float) or isinstance(value, bool) or value > 1:
        return value
    hint = ""
    if value == 1:
        hint = "; 1 leaves the corpora as they are, as null does"
    elif value > 0:
        hint = f"; an exponent of {value:g} is temperature: {1 / value:.3g}"
    raise _refuse(f"must be greater than 1, got {value:g}{hint}")


_TAG_FORMS: list[dict[str, Any]] = [
    {"const": True},
    {"type": "string", "pattern": f"^{TAG_PATTERN}$"},
    {"type": "null"},
]
Tag = Annotated[bool | str | None, BeforeValidator(_tag), WithJsonSchema({"anyOf": _TAG_FORMS})]


class CorpusConfig(Section):
    """Sentences and their translations: two parallel text files, or one file of pairs."""

    source: Text | None = Field(
        None,
        description="file of source sentences, one a line, plain or gzip; with * and ? in its name "
        "all files that match, as shards of one corpus",
    )
    target: Text | None = Field(None, description="file of their translations, line by line")
    pairs: Text | None = Field(
        None,
        description="one file that holds both sides, instead: .tsv, .jsonl or .tmx, plain or .gz; "
        "or a public test set: sacrebleu:NAME, such as sacrebleu:wmt14; * and ? name shards",
    )
    fields: Annotated[Fields | None, BeforeValidator(as_tuple)] = Field(
        None,
        description="which columns (numbers from 1, or names in a first line) or JSON names hold "
        "source and target; null = columns 1 and 2, or the language codes, or source and target",
    )
    weight: float = Field(
        1.0, gt=0.0, description="how many times an epoch holds the corpus; training data only"
    )
    source_lang: Language | None = Field(
        None, description="language of the source, where it is not data.source_lang"
    )
    target_lang: Language | None = Field(
        None, description="language of the target, where it is not data.target_lang"
    )
    tag: Tag = Field(
        None,
        description="token <NAME> before each source: a name such as bt, or true for 2 and the "
        "target language, such as <2de>",
    )

    def named_files(self) -> dict[str, str]:
        """Key -> what stands there, for those of source, target and pairs that are given."""
        values = {"source": self.source, "target": self.target, "pairs": self.pairs}
        return {key: value for key, value in values.items() if value is not None}

    def problems(self) -> Iterator[Problem]:
        keys = tuple(self.named_files())
        if "pairs" in keys and len(keys) > 1:
            yield Problem(keys[::-1], "holds both sides; remove source and target")
        elif "pairs" not in keys and len(keys) < 2:
            missing = "target" if "source" in keys else "source"
            yield Problem((missing,), "is required")
        kind = None if self.pairs is None else pairs_kind(self.pairs)
        if self.pairs is not None and kind is None:
            yield Problem(("pairs",), f"{self.pairs!r} is none of {PAIRS_FORMS}")
        if self.fields is not None and kind not in ("tsv", "jsonl"):
            yield Problem(("fields",), "has an effect only with pairs: a .tsv or .jsonl file")
        elif self.fields is not None:
            yield from self._field_problems(self.fields, kind == "tsv")

    def _field_problems(self, fields: Fields, table: bool) -> Iterator[Problem]:
        numbers = [isinstance(field, int) for field in fields]
        if fields[0] == fields[1]:
            yield Problem(("fields",), f"names {fields[0]} for both sides")
        if any(numbers) and not (table and all(numbers)):
            form = "two names or two numbers" if table else "two names"
            yield Problem(("fields",), f"wants {form}")
        elif any(isinstance(field, int) and field < 1 for field in fields):
            yield Problem(("fields",), "columns are counted from 1")


class DataConfig(Section):
    """The text files and which of their pairs are used."""

    source_lang: Language = Field(description="language code of the source, such as en")
    target_lang: Language = Field(
        description="language code of the target; also chooses the tokenizer of BLEU"
    )
    train: Annotated[list[CorpusConfig], OneOrMany] = Field(
        min_length=1, description="training corpus, or a list of them"
    )
    valid: CorpusConfig = Field(description="validation corpus, scored every train.valid_every")
    test: CorpusConfig | None = Field(None, description="test corpus, scored once at the end")
    temperature: Annotated[float, BeforeValidator(_temperature), Field(gt=1.0)] | None = Field(
        None,
        description="T: an epoch takes from each training corpus of n pairs in proportion to "
        "n^(1/T); null = as many as it has",
    )
    max_length: Annotated[Whole, Field(ge=2)] = Field(
        256, description="longest side of a training pair in subwords, tag and EOS included"
    )
    max_ratio: Annotated[float, Field(ge=1.0)] | None = Field(
        None, description="largest longer/shorter ratio of subword counts; null = no limit"
    )
    drop_duplicates: bool = Field(False, description="use repeated training pairs only once")
    workers: NotNegative = Field(
        0, description="processes that prepare batches; 0 = the main process"
    )
    cache_dir: Text | None = Field(
        None, description="directory of encoded corpora, shared by runs; null = the run directory"
    )

    def problems(self) -> Iterator[Problem]:
        for name, corpus in self.named_corpora():
            for problem in corpus.problems():
                keys = tuple(f"{name}.{key}" for key in problem.keys)
                yield Problem(keys, problem.message)
            if corpus.weight != 1.0 and not name.startswith("train"):
                yield Problem((f"{name}.weight",), "only training corpora have a weight; remove it")
            yield from self._tag_problems(name, corpus)
        if self.temperature is not None and len(self.train) == 1:
            yield Problem(
                ("temperature", "train"), "has no effect with one training corpus; remove it"
            )

    def _tag_problems(self, name: str, corpus: CorpusConfig) -> Iterator[Problem]:
        """What the model cannot know: a tag that is none, or that no training corpus has."""
        tag, known = self.tag_of(corpus), self.train_tags()
        keys = (f"{name}.tag", name)
        problem = None if tag is None else name_problem(tag)
        if problem is not None:
            _, target = self.langs_of(corpus)
            yield Problem(keys, f"the language {target!r} makes no tag ({problem}); name one")
        elif name.startswith("train"):
            return
        elif tag is None and not self.untagged():
            yield Problem(
                keys, f"is required: all training corpora have one; name one of {listed(known)}"
            )
        elif tag is not None and tag not in known:
            trained = f"they have {listed(known)}" if known else "they have none; remove it"
            yield Problem(keys, f"no training corpus has the tag {tag}; {trained}")

    def langs_of(self, corpus: CorpusConfig) -> tuple[str, str]:
        """Source and target language of a corpus."""
        return corpus.source_lang or self.source_lang, corpus.target_lang or self.target_lang

    def tag_of(self, corpus: CorpusConfig) -> str | None:
        """The name of the tag before each of its sources; None: there is none."""
        if corpus.tag is True:
            return language_tag(self.langs_of(corpus)[1])
        return corpus.tag or None

    def train_tags(self) -> dict[str, str | None]:
        """Tag -> target language of its training text; None where there are several."""
        found: dict[str, str | None] = {}
        for corpus in self.train:
            tag, lang = self.tag_of(corpus), self.langs_of(corpus)[1]
            if tag is not None:
                note_tag(found, tag, lang)
        return found

    def untagged(self) -> bool:
        """Whether some training text has no tag."""
        return any(self.tag_of(corpus) is None for corpus in self.train)

    def named_corpora(self) -> Iterator[tuple[str, CorpusConfig]]:
        """(key below data, corpus) of all; "train" alone, or "train.0", "train.1", ..."""
        for number, corpus in enumerate(self.train):
            yield ("train" if len(self.train) == 1 else f"train.{number}"), corpus
        yield "valid", self.valid
        if self.test is not None:
            yield "test", self.test


class TokenizerConfig(Section):
    """The vocabulary: learned from the training text, or taken from files."""

    # 4 special tokens and 256 bytes are in every vocabulary (tokenizer.MIN_VOCAB_SIZE).
    vocab_size: Annotated[Whole, Field(ge=260)] = Field(
        6000, description="subwords to learn, special tokens and the 256 bytes included"
    )
    shared: bool = Field(True, description="one vocabulary for both languages")
    level: Literal["subword", "character"] = Field(
        "subword", description="what a token is at most: a word or one Unicode character"
    )
    dropout: Share = Field(
        0.0,
        description="BPE-dropout: probability that a merge is left out when training text is cut "
        "into subwords, anew in every epoch",
    )
    path: Text | None = Field(None, description="existing tokenizer.json to use for both languages")
    source_path: Text | None = Field(None, description="existing source tokenizer (shared: false)")
    target_path: Text | None = Field(None, description="existing target tokenizer (shared: false)")

    def problems(self) -> Iterator[Problem]:
        if self.dropout > 0 and self.level == "character":
            yield Problem(("dropout", "level"), "needs level: subword: a character is never cut")
        if self.shared:
            for name in self.changed("source_path", "target_path"):
                yield Problem((name, "shared"), "has no effect with shared: true; use path instead")
        elif self.path is not None:
            yield Problem(
                ("path", "shared"),
                "has no effect with shared: false; use source_path and target_path instead",
            )
        elif (self.source_path is None) != (self.target_path is None):
            name = "source_path" if self.source_path is not None else "target_path"
            yield Problem(
                (name, "source_path", "target_path"),
                "is given alone; give both source_path and target_path, or neither",
            )
        if self.path is not None or self.source_path is not None:
            for name in self.changed("vocab_size", "level"):
                yield Problem(
                    (name, "path", "source_path"),
                    "has no effect when an existing tokenizer is used; remove it",
                )
