"""The options of the command line that have more than a name: one alias each, with its help text.

Decoding options are None when they are not given; then the decode section of the model's
configuration decides, then the defaults of TranslateOptions.
"""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Annotated

import typer


def say(text: str) -> None:
    """Print a line to stderr."""
    print(text, file=sys.stderr, flush=True)


class Precision(StrEnum):
    """Values of --precision."""

    auto = "auto"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class Format(StrEnum):
    """Values of --format."""

    text = "text"
    jsonl = "jsonl"


class Level(StrEnum):
    """Values of --level."""

    subword = "subword"
    character = "character"


class Side(StrEnum):
    """Values of --side."""

    source = "source"
    target = "target"


Count = int | None
Number = float | None
Word = str | None
Words = list[str] | None

# ---- everywhere -------------------------------------------------------------------------------

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Input = Annotated[
    str, typer.Option("--input", metavar="F", help='Text, plain or gzip; "-" is stdin.')
]
Output = Annotated[
    str, typer.Option("--output", metavar="F", help='Result; "-" is stdout, .gz compresses.')
]
ConfigFile = Annotated[
    Word, typer.Option("--config", metavar="YAML", help="Configuration file of the run.")
]
Settings = Annotated[
    Words,
    typer.Option(
        "--set", metavar="SECTION.KEY=VALUE", help="Override a setting of --config; repeatable."
    ),
]

# ---- train, tokenize, encode ------------------------------------------------------------------

Fresh = Annotated[
    bool, typer.Option("--fresh", help="Remove the run in the run directory and start anew.")
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Check the corpus, show sizes and batches, train nothing."),
]
Files = Annotated[
    Words, typer.Argument(metavar="FILES", show_default=False, help="Text; all languages mixed.")
]
SourceFiles = Annotated[
    Words, typer.Option("--source", metavar="F", help="Source text; repeatable.")
]
TargetFiles = Annotated[
    Words, typer.Option("--target", metavar="F", help="Target text; repeatable.")
]
VocabSize = Annotated[
    Count, typer.Option("--vocab-size", metavar="N", help="Tokens to learn (default 6000).")
]
LevelOption = Annotated[
    Level | None, typer.Option("--level", help="The most a token can be (default: subword).")
]
TokenizerOutput = Annotated[
    str,
    typer.Option(
        "--output", metavar="F", help="With two vocabularies: F with .source and .target inside."
    ),
]
TokenizerModel = Annotated[
    Word,
    typer.Option("--model", metavar="RUN", help="Run or checkpoint directory, or tokenizer.json."),
]
SideOption = Annotated[Side, typer.Option("--side", help="Whose vocabulary.")]
Ids = Annotated[bool, typer.Option("--ids", help="Numbers instead of pieces.")]
Decode = Annotated[
    bool, typer.Option("--decode", help="The way back: pieces, or numbers with --ids, to text.")
]

# ---- decoding ---------------------------------------------------------------------------------

Models = Annotated[
    Words,
    typer.Option(
        "--model",
        metavar="RUN",
        help="Run (its best checkpoint) or checkpoint directory; several form an ensemble.",
    ),
]
Beam = Annotated[
    Count, typer.Option("--beam", metavar="K", help="Hypotheses kept per sentence; 1: greedy.")
]
Nbest = Annotated[
    Count, typer.Option("--nbest", metavar="N", help="Outputs per line, at most --beam.")
]
LengthPenalty = Annotated[
    Number,
    typer.Option("--length-penalty", metavar="A", help="Rank by log-probability / length^A."),
]
MaxLength = Annotated[
    Count,
    typer.Option("--max-length", metavar="N", help="Output tokens (default 3 x source + 20)."),
]
MinLength = Annotated[
    Count, typer.Option("--min-length", metavar="N", help="Output tokens before the end.")
]
NoRepeat = Annotated[
    Count, typer.Option("--no-repeat-ngram", metavar="N", help="No N tokens in a row come twice.")
]
Sample = Annotated[bool, typer.Option("--sample", help="Draw at random instead of searching.")]
Temperature = Annotated[
    Number,
    typer.Option("--temperature", metavar="X", help="With --sample: below 1 safer, above bolder."),
]
TopK = Annotated[
    Count, typer.Option("--top-k", metavar="N", help="With --sample: the N likeliest tokens only.")
]
TopP = Annotated[
    Number, typer.Option("--top-p", metavar="X", help="With --sample: this share of the mass only.")
]
Seed = Annotated[Count, typer.Option("--seed", metavar="S", help="With --sample: of the draws.")]
SplitLong = Annotated[
    bool, typer.Option("--split-long", help="Translate over-long lines sentence by sentence.")
]
MaxSource = Annotated[
    Count,
    typer.Option("--max-source-length", metavar="N", help="Subwords read of a line (1000)."),
]
BatchTokens = Annotated[
    Count, typer.Option("--batch-tokens", metavar="N", help="Padded tokens of a batch (4096).")
]
BatchSize = Annotated[
    Count,
    typer.Option("--batch-size", metavar="N", help="Sentences of a batch; 1: line by line."),
]
Device = Annotated[
    str, typer.Option("--device", metavar="D", help="auto, cpu, cuda, cuda:N or mps.")
]
PrecisionOption = Annotated[Precision, typer.Option("--precision", help="Arithmetic.")]
Threads = Annotated[
    Count, typer.Option("--threads", min=1, metavar="N", help="CPU threads (torch's choice).")
]

SEARCH = (
    "beam",
    "nbest",
    "length_penalty",
    "max_length",
    "min_length",
    "no_repeat_ngram",
    "sample",
    "temperature",
    "top_k",
    "top_p",
    "seed",
    "split_long",
    "max_source_length",
    "batch_tokens",
    "batch_size",
)
"""Parameters of the commands that are fields of TranslateOptions."""

# ---- translate --------------------------------------------------------------------------------

Scores = Annotated[
    bool, typer.Option("--scores", help="Text lines become: i ||| text ||| score ||| ranked.")
]
FormatOption = Annotated[Format, typer.Option("--format", help="Layout of the output.")]
Prefix = Annotated[
    Word, typer.Option("--prefix", metavar="F", help="Per line, what its translation begins with.")
]

# ---- eval -------------------------------------------------------------------------------------

Source = Annotated[
    Word, typer.Option("--source", metavar="F", help="With --model: the text to translate.")
]
Refs = Annotated[Words, typer.Option("--ref", metavar="F", help="Reference; repeatable.")]
Hyp = Annotated[
    Word, typer.Option("--hyp", metavar="F", help="Translations to score, instead of --model.")
]
Baseline = Annotated[
    Word,
    typer.Option("--baseline", metavar="F", help="Other translations: paired bootstrap test."),
]
Lang = Annotated[
    Word, typer.Option("--lang", metavar="L", help="Target language; chooses BLEU's tokenizer.")
]
BleuTokenizer = Annotated[
    Word, typer.Option("--tokenize", metavar="T", help="BLEU's tokenizer, by sacreBLEU's name.")
]
Lowercase = Annotated[bool, typer.Option("--lowercase", help="Ignore case.")]
Confidence = Annotated[bool, typer.Option("--confidence", help="95 % intervals by bootstrap.")]
Samples = Annotated[
    Count, typer.Option("--samples", min=2, metavar="N", help="Bootstrap samples (1000).")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
KeepOutput = Annotated[
    Word, typer.Option("--output", metavar="F", help="With --model: keep the translations here.")
]
