"""The commands `init` and `config`: a first configuration for a corpus, and what one means."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mttrain.cli_checks import at_least, must_exist, say
from mttrain.cli_options import ConfigFile, Debug, Device, Number, Output, Settings, opt
from mttrain.errors import ConfigError, DataError, MissingDependency

if TYPE_CHECKING:
    from mttrain.pairs import ParallelText
    from mttrain.starter import Machine, Sizes, Texts
    from mttrain.survey import Facts, Sample

# Endings of text files that tell no language.
_NO_LANGUAGE = frozenset({
    "gz", "txt", "text", "raw", "tok", "bpe", "sp", "clean", "norm", "low", "lc", "tc", "src",
    "tgt", "trg", "ref",
})  # fmt: skip
Lang = str | None


# ---- config -----------------------------------------------------------------------------------


def config(
    config: ConfigFile = None,
    settings: Settings = None,
    schema: Annotated[bool, opt("--schema", None, "The JSON schema of such files.")] = False,
    as_json: Annotated[bool, opt("--json", None, "JSON instead of YAML.")] = False,
    output: Output = "-",
    debug: Debug = False,
) -> None:
    """Check a configuration and print it whole, or its schema."""
    if schema == (config is not None):
        raise ConfigError("Give either --config X.yaml, to see what it means, or --schema.")
    if schema and (settings or as_json):
        idle = "--set" if settings else "--json"
        raise ConfigError(f"{idle} has no effect with --schema, which is JSON; remove it.")
    from mttrain.cli_checks import refuse_overwriting
    from mttrain.config import dump_config, load_config
    from mttrain.corpus import write_lines

    if config is None:
        from mttrain.schema import schema_text

        text = schema_text()
    else:
        refuse_overwriting(output, {"configuration": config})
        loaded = load_config(config, settings or ())
        if loaded.train.init_from is not None:
            from mttrain.origin import with_origin

            loaded = with_origin(loaded, None)
        plain = loaded.model_dump(mode="json")
        text = json.dumps(plain, ensure_ascii=False) if as_json else dump_config(loaded)
    write_lines(output, text.removesuffix("\n").split("\n"))


# ---- init -------------------------------------------------------------------------------------


def init(
    context: typer.Context,
    source: Annotated[
        str | None, typer.Argument(metavar="SRC", help="Source text, or a file of pairs.")
    ] = None,
    target: Annotated[
        str | None, typer.Argument(metavar="TGT", help="Its translations, line by line.")
    ] = None,
    source_lang: Annotated[Lang, opt("--source-lang", "L", "As en (ending of SRC).")] = None,
    target_lang: Annotated[Lang, opt("--target-lang", "L", "As de (ending of TGT).")] = None,
    valid_source: Annotated[str | None, opt("--valid-source", "F", "For validation.")] = None,
    valid_target: Annotated[str | None, opt("--valid-target", "F", "Its translations.")] = None,
    valid: Annotated[Number, opt("--valid", "N", "Pairs cut off for validation.")] = None,
    test: Annotated[Number, opt("--test", "N", "Pairs cut off as a test set (none).")] = None,
    seed: Annotated[Number, opt("--seed", "S", "Of what is cut off (1).")] = None,
    device: Device = None,
    output: Annotated[str, opt("--output", "YAML", "The file to write.")] = "mine.yaml",
    run_dir: Annotated[str | None, opt("--run-dir", "DIR", "Of the run (runs/NAME).")] = None,
    as_json: Annotated[bool, opt("--json", None, "Print one JSON object.")] = False,
    debug: Debug = False,
) -> None:
    """Write a commented configuration that suits a corpus."""
    _check_init(context)
    assert source is not None  # held by _check_init
    from mttrain.corpus import require_writable
    from mttrain.pairs import ParallelText
    from mttrain.starter import Machine, sizing
    from mttrain.survey import SAMPLE, survey

    path = Path(output)
    require_writable(path)
    langs, guessed = _languages(source, target, source_lang, target_lang)
    text = _corpus(source, target, langs)
    plan = _Plan(path, langs, text, cut_valid=valid_source is None, tests=test or 0)
    plan.refuse_existing()
    machine, place = _machine(device)
    if guessed:
        say(f"languages: {langs[0]} to {langs[1]} ({guessed})")
    if valid_source is not None and valid_target is not None:
        for _ in ParallelText((valid_source, valid_target), langs).required_pairs():
            pass  # in step, UTF-8, not empty
    facts, candidates = survey(
        text.pairs(), sample=plan.sample(valid, SAMPLE), seed=1 if seed is None else seed
    )
    if facts.pairs < 2:
        raise DataError(f"{text.name}: {facts.pairs} of the pairs have text on both sides.")
    held = plan.held_out(candidates, facts, valid)
    sample = _sample(candidates, held, facts.pairs)
    sizes = sizing(facts, langs[1], machine, sample)
    texts = plan.texts(None if valid_source is None else (valid_source, str(valid_target)))
    top = {"run_dir": run_dir or f"runs/{path.stem}", "seed": 1, "device": _asked(device)}
    top |= dict(zip(("source_lang", "target_lang"), langs, strict=True))
    other = None if machine.gpu else sizing(facts, langs[1], Machine(machine.cores, True), sample)
    yaml = _yaml(top, texts, facts, sizes, other, place)
    pairs = plan.write(held, yaml, facts.pairs)
    _warn(facts, langs[1])
    _print_init(plan, facts, sizes, texts, pairs, as_json)


def _check_init(context: typer.Context) -> None:
    """Refuse what is missing, contradicts itself or has no effect."""
    from mttrain.dataconfig import PAIRS_FORMS, pairs_kind

    at = context.params
    source, target = at["source"], at["target"]
    given = at["valid_source"] is not None
    if source is None:
        raise ConfigError("Name the corpus: mttrain init SRC TGT.")
    single = pairs_kind(source) is not None
    if target is None and not single:
        raise ConfigError(f"Name the translations of {source} too, or one file of {PAIRS_FORMS}.")
    if target is not None and single:
        raise ConfigError(f"{source} holds both sides; remove {target}.")
    if given != (at["valid_target"] is not None):
        raise ConfigError("--valid-source and --valid-target belong together; give both.")
    if given and at["valid"] is not None:
        raise ConfigError("--valid cuts off what --valid-source gives; remove one of them.")
    if given and at["test"] is None and at["seed"] is not None:
        raise ConfigError("--seed has no effect where nothing is cut off; remove it.")
    if Path(at["output"]).suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--output {at['output']}: name a file that ends in .yaml.")
    for name in ("valid", "test"):
        at_least(f"--{name}", 1, at[name])
    at_least("--seed", 0, at["seed"], 2**63 - 1)
    files = [source, target, at["valid_source"], at["valid_target"]]
    if pairs_kind(source) == "sacrebleu":
        files = files[1:]
    must_exist(*files)
    for file in files:
        if file is not None and not os.path.isfile(file):
            raise DataError(f"{file} is no plain file; it is read several times.")
    if target is not None and os.path.samefile(source, target):
        raise ConfigError(f"SRC and TGT are the same file: {source}.")


def _languages(
    source: str, target: str | None, source_lang: str | None, target_lang: str | None
) -> tuple[tuple[str, str], str]:
    """As given, or from the names of the files, or from the first object of a file of JSON lines;
    and where what is guessed comes from, "" if nothing is."""
    from mttrain.dataconfig import pairs_kind
    from mttrain.languages import suggested_code

    given = source_lang, target_lang
    guessed: tuple[str | None, str | None] = None, None
    origin = "from the names of the files"
    if target is not None:
        guessed = _ending(source), _ending(target)
    elif None in given and pairs_kind(source) == "jsonl":
        found = _languages_of_objects(source) or guessed
        if not {*given} - {None} <= {*found}:
            found = guessed
        # Of two languages one is named: the other side is the other one.
        swapped = source_lang == found[1] or target_lang == found[0]
        guessed = (found[1], found[0]) if swapped else found
        origin = f"from the first object of {source}"
    codes = [one or other for one, other in zip(given, guessed, strict=True)]
    for side, code in zip(("source", "target"), codes, strict=True):
        better = None if code is None else suggested_code(code)
        if better is not None:
            raise ConfigError(f"{code} is not a language code; give --{side}-lang {better}.")
    first, second = codes
    if first is None or second is None:
        sides = [side for side, code in zip(("source", "target"), codes, strict=True) if not code]
        options = [f"--{side}-lang {'en' if side == 'source' else 'de'}" for side in sides]
        raise ConfigError(
            f"Which language is the {' and which the '.join(sides)}? Give "
            f"{'its code' if len(sides) == 1 else 'their codes'}, for example: {' '.join(options)}"
        )
    return (first, second), origin if None in given else ""


def _languages_of_objects(path: str) -> tuple[str, str] | None:
    """The two language codes among the names of the first object of a file of JSON lines.

    Its own texts, or those of its "translation"; None when they are not exactly two.
    """
    from mttrain.corpus import read_lines

    line = next((line for line in read_lines(path) if line.strip()), "")
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None  # the reader of the pairs names the line
    if not isinstance(content, dict):
        return None
    for names in (content, content.get("translation")):
        if isinstance(names, dict):
            codes = [key for key, value in names.items() if isinstance(value, str)]
            codes = [key for key in codes if _is_language(key)]
            if len(codes) == 2:
                return codes[0], codes[1]
    return None


def _is_language(word: str) -> bool:
    from mttrain.languages import looks_like_code

    return looks_like_code(word) and word.lower() not in _NO_LANGUAGE


def _sample(candidates: list[Any], held: dict[str, Any], pairs: int) -> Sample:
    """Those drawn that stay in the training text, and how many stay of all."""
    from mttrain.holdout import left_for_training
    from mttrain.survey import Sample

    kept = list(filter(left_for_training(held), candidates))
    out = sum(map(len, held.values()))
    return Sample(kept, (pairs - out) * len(kept) / max(1, len(candidates) - out))


def _ending(name: str) -> str | None:
    """corpus.de-en.de.gz -> de; None when the name ends in no language code."""
    for suffix in reversed(Path(name).suffixes):
        word = suffix.removeprefix(".")
        if _is_language(word):
            return word
        if word.lower() not in _NO_LANGUAGE:
            return None
    return None


def _corpus(source: str, target: str | None, langs: tuple[str, str]) -> ParallelText:
    """The one place where the pairs come from."""
    from mttrain.pairs import ParallelText, pairs_file

    if target is None:
        return pairs_file(source, langs)
    return ParallelText((source, target), langs)


class _Plan:
    """Which files are written beside the configuration, and what goes into them."""

    def __init__(
        self, path: Path, langs: tuple[str, str], text: ParallelText, *, cut_valid: bool, tests: int
    ) -> None:
        from mttrain.schema import SCHEMA_FILE

        self.path, self.text, self.cut_valid, self.tests = path, text, cut_valid, tests
        self.schema = path.with_name(SCHEMA_FILE)
        splits = ["valid"] * cut_valid + ["test"] * bool(tests)
        packed = ".gz" * text.files[0].endswith(".gz")
        ends = langs if langs[0] != langs[1] else (f"source.{langs[0]}", f"target.{langs[1]}")
        self.files: dict[str, tuple[Path, Path]] = {}
        for split in [*(["train"] if splits else []), *splits]:
            gz = packed if split == "train" else ""
            one, two = (path.with_name(f"{path.stem}.{split}.{end}{gz}") for end in ends)
            self.files[split] = one, two

    def refuse_existing(self) -> None:
        """Nothing is overwritten."""
        names = [self.path, *(path for both in self.files.values() for path in both)]
        there = [str(path) for path in names if os.path.lexists(path)]
        if there:
            raise ConfigError(
                f"{', '.join(there)}: {'exists' if len(there) == 1 else 'exist'} already; name "
                "another --output, or remove what is there."
            )

    def sample(self, valid: int | None, least: int) -> int:
        """How many pairs to draw."""
        from mttrain.holdout import OVERSAMPLE, validation_size

        wanted = self.tests
        if self.cut_valid:
            wanted += validation_size(2**63) if valid is None else valid
        return max(least, OVERSAMPLE * wanted)

    def held_out(self, candidates: list[Any], facts: Facts, valid: int | None) -> dict[str, Any]:
        """Split -> pairs."""
        from mttrain.holdout import choose, validation_size

        wanted = {}
        if self.cut_valid:
            wanted["valid"] = validation_size(facts.pairs) if valid is None else valid
        if self.tests:
            wanted["test"] = self.tests
        if wanted and sum(wanted.values()) >= facts.pairs:
            raise ConfigError(
                f"{sum(wanted.values())} pairs are to be cut off {facts.pairs}: nothing would be "
                "left for training. Ask for fewer with --valid N and --test N."
            )
        return choose(candidates, self.text.pairs, wanted) if wanted else {}

    def texts(self, valid: tuple[str, str] | None) -> dict[str, Texts]:
        """Split -> files, as the configuration will name them."""
        from mttrain.starter import Texts

        found = {"train": Texts(self.text.files)}
        if valid is not None:
            found["valid"] = Texts(valid)
        return found | {
            split: Texts((str(both[0]), str(both[1]))) for split, both in self.files.items()
        }

    def write(self, held_out: dict[str, Any], yaml: str, pairs: int) -> int:
        """Write everything; returns the number of training pairs."""
        from mttrain.corpus import atomic_write_text
        from mttrain.holdout import write_splits
        from mttrain.schema import is_schema, schema_text

        kept = write_splits(self.text.pairs, held_out, self.files, {self.path: yaml})
        if not os.path.lexists(self.schema) or is_schema(self.schema):
            atomic_write_text(self.schema, schema_text())
        else:
            say(f"warning: {self.schema} is not ours and stays; editors will not know the keys")
        return kept if self.files else pairs


def _machine(device: str | None) -> tuple[Machine, str]:
    """What training will run on, and how the file calls it."""
    from mttrain.starter import Machine

    if device is not None:
        from pydantic import TypeAdapter, ValidationError

        from mttrain import settings

        try:
            TypeAdapter(settings.Device).validate_python(device)
        except ValidationError:
            raise ConfigError(f"--device {device}: write cpu, cuda, cuda:N, mps or auto.") from None
    import torch

    from mttrain.cores import within_quota
    from mttrain.linear import bfloat16_is_fast

    cores = within_quota(torch.get_num_threads())
    if device in (None, "auto") and torch.cuda.is_available():
        return Machine(cores, True), torch.cuda.get_device_name()
    if device in (None, "auto", "cpu"):
        machine = Machine(cores, False, bfloat16_is_fast())
        return machine, f"{cores} CPU core{'s' if cores > 1 else ''}"
    return Machine(cores, True), f"a GPU ({device})"


def _asked(device: str | None) -> str | None:
    return None if device == "auto" else device


def _yaml(
    top: dict[str, Any],
    texts: dict[str, Texts],
    facts: Facts,
    sizes: Sizes,
    other: Sizes | None,
    place: str,
) -> str:
    from mttrain.schema import SCHEMA_FILE
    from mttrain.starter import starter_yaml

    one, two = facts.source, facts.target
    head = [
        f"yaml-language-server: $schema={SCHEMA_FILE}",
        f"A beginning for {facts.pairs:,} pairs of {top['source_lang']} and {top['target_lang']}, "
        f"with {one.mean:.0f} and {two.mean:.0f} characters a line, on {place}.",
        "Chosen by the size of the corpus, not tuned on it; written by `mttrain init`.",
    ]
    return starter_yaml(head, top, texts, sizes, other)


def _warn(facts: Facts, target_lang: str) -> None:
    from mttrain.metrics import bleu_tokenizer, require_tokenizer

    if facts.blank:
        say(f"warning: {facts.blank} pairs are blank on one side or both; they are not counted")
    try:
        require_tokenizer(bleu_tokenizer(target_lang))
    except MissingDependency as error:
        say(f"warning: {error}")


def _print_init(
    plan: _Plan, facts: Facts, sizes: Sizes, texts: dict[str, Texts], pairs: int, as_json: bool
) -> None:
    from mttrain.config import load_config
    from mttrain.corpus import write_lines

    if not as_json:
        write_lines(None, _init_lines(plan, facts, texts, pairs))
        return
    result = {
        "output": str(plan.path),
        "schema": str(plan.schema),
        "corpus": asdict(facts),
        "training_pairs": pairs,
        "files": {split: list(text.files) for split, text in texts.items()},
        "epochs": round(sizes.epochs, 2),
        "estimated_hours": None if sizes.hours is None else round(sizes.hours, 2),
        "config": load_config(plan.path).model_dump(mode="json"),
    }
    write_lines(None, [json.dumps(result, ensure_ascii=False)])


def _init_lines(plan: _Plan, facts: Facts, texts: dict[str, Texts], pairs: int) -> Iterator[str]:
    from mttrain.schema import is_schema

    for name, side in (("source", facts.source), ("target", facts.target)):
        yield (
            f"{name}: {facts.pairs} lines with text, {side.mean:.1f} characters on average, 99 % "
            f"have up to {side.long}; {side.characters} different characters, mostly {side.script}"
        )
    for split, text in texts.items():
        count = f", {pairs} pairs" if split == "train" else ""
        cut = " (cut off the corpus)" if split in plan.files and split != "train" else ""
        yield f"{split}: {' and '.join(text.files)}{count}{cut}"
    known = f", and {plan.schema.name} beside it, which tells editors the keys"
    yield f"written: {plan.path}{known if is_schema(plan.schema) else ''}"
    yield f"next: mttrain train --config {plan.path} --dry-run"
