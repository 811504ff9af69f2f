"""How each of the other programs is made to do the same work as ours.

A peer is a virtual environment (`env`). It trains and decodes on the common text, with its own
defaults where nothing is said here: same architecture, dropout, smoothed loss, Adam (0.9, 0.98),
tied embeddings, clipping, 4,096-token batches, no validation. Training speed is read from its own
log (`bench_setup.follow`); decoding is one pass over the test text at a fixed output length, with
random weights, and without the loading of the model.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from bench_program import Program, number
from bench_setup import (
    BATCH_SENTENCES,
    CLIP,
    RATE,
    SMOOTHING,
    TOKENS,
    WARMUP_STEPS,
    BenchError,
    Measured,
    ours,
    run,
)

HERE = Path(__file__).resolve().parent
CHECKPOINT_UPDATES = 2  # of the run whose weights are decoded with


class Fairseq(Program):
    """fairseq-train counts target tokens without padding (wpb: of a batch)."""

    name, package = "fairseq", "fairseq-fixed"
    report = r"\bwpb=([\d.,]+).*\bnum_updates="

    def help_command(self) -> list[str | Path]:
        return [self.program("fairseq-train"), "--help"]

    def data(self) -> Path:
        folder = self.folder / "data"
        parts = {part: self.setup.text(f"{part}.tok") for part in ("train", "valid", "test")}
        command: list[str | Path] = [
            self.program("fairseq-preprocess"), "--source-lang", "src", "--target-lang", "tgt",
            "--destdir", folder, "--joined-dictionary",
            "--srcdict", self.setup.text("dict.fairseq.txt"),
        ]  # fmt: skip
        for part, prefix in parts.items():
            command += [f"--{part}pref", prefix]
        self.made(folder / "test.src-tgt.tgt.idx", command)
        return folder

    def command(self, updates: int) -> list[str | Path]:
        size, setup = self.setup.model, self.setup
        sides: list[str | Path] = []
        for side in ("encoder", "decoder"):
            sides += [
                f"--{side}-layers", str(size.layers), f"--{side}-embed-dim", str(size.d_model),
                f"--{side}-ffn-embed-dim", str(size.d_ff),
                f"--{side}-attention-heads", str(size.heads),
            ]  # fmt: skip
        return [
            self.program("fairseq-train"), self.data(), "--arch", "transformer", *sides,
            "--share-all-embeddings", "--dropout", str(size.dropout),
            "--max-tokens", str(setup.batch_tokens), "--clip-norm", str(CLIP),
            "--criterion", "label_smoothed_cross_entropy", "--label-smoothing", str(SMOOTHING),
            "--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--lr", str(RATE),
            "--lr-scheduler", "inverse_sqrt", "--warmup-updates", str(WARMUP_STEPS),
            "--max-update", str(updates), "--num-workers", "0", "--disable-validation",
            "--log-interval", "1", "--log-format", "simple", "--seed", "1",
            *(["--cpu"] if setup.device == "cpu" else ["--bf16"]),
        ]  # fmt: skip

    def train(self) -> Measured:
        return self.follow([*self.command(10**6), "--no-save"])

    def decode(self, beam: int, variant: str) -> Measured:
        save = self.folder / "checkpoints"
        command = [*self.command(CHECKPOINT_UPDATES), "--save-dir", save]
        model = self.made(save / "checkpoint_last.pt", command)
        command = [
            self.program("fairseq-generate"), self.data(), "--path", model, "--beam", str(beam),
            "--batch-size", str(BATCH_SENTENCES), "--min-len", str(TOKENS - 1),
            "--max-len-a", "0", "--max-len-b", str(TOKENS - 1), "--gen-subset", "test",
            "--num-workers", "0", *(["--cpu"] if self.setup.device == "cpu" else []),
        ]  # fmt: skip
        finished = run(command, self.setup.environment())
        outputs = re.findall(r"^H-\d+\t\S+\t(.*)$", finished.output, re.MULTILINE)
        rate = self.per_second(r"tokens\) in ([\d.]+)s", finished.output)
        return Measured(rate, finished.peak_mb, {"tokens": self.output_length(outputs)})


class OpenNmtPy(Program):
    """onmt_train prints the mean target tokens of a batch (bsz: source/target/sentences)."""

    name, package = "opennmt-py", "OpenNMT-py"
    report = r"Step +\d+.*\bbsz:\s*\d+\s*/\s*(\d+)\s*/"

    def help_command(self) -> list[str | Path]:
        return [self.program("onmt_train"), "--help"]

    def command(self, updates: int) -> list[str | Path]:
        size, setup = self.setup.model, self.setup
        vocabulary = setup.text("dict.onmt.txt")
        paths = {f"path_{side}": setup.text(f"train.tok.{side}") for side in ("src", "tgt")}
        config = {
            "data": {"corpus_1": {**paths, "transforms": []}},
            "src_vocab": vocabulary, "tgt_vocab": vocabulary, "share_vocab": True,
            "save_data": str(self.folder / "data"),
            "encoder_type": "transformer", "decoder_type": "transformer",
            "enc_layers": size.layers, "dec_layers": size.layers, "heads": size.heads,
            "hidden_size": size.d_model, "word_vec_size": size.d_model,
            "transformer_ff": size.d_ff, "dropout": [size.dropout], "attention_dropout": [0.0],
            "position_encoding": True, "share_embeddings": True, "share_decoder_embeddings": True,
            "param_init": 0, "param_init_glorot": True, "label_smoothing": SMOOTHING,
            "optim": "adam", "adam_beta1": 0.9, "adam_beta2": 0.98, "max_grad_norm": CLIP,
            "learning_rate": 2.0, "decay_method": "noam", "warmup_steps": WARMUP_STEPS,
            "batch_type": "tokens", "batch_size": setup.batch_tokens, "normalization": "tokens",
            "accum_count": [1], "num_workers": 0, "train_steps": updates, "report_every": 1,
            "save_checkpoint_steps": updates, "save_model": str(self.folder / "model"),
            **({"world_size": 1, "gpu_ranks": [0]} if setup.device == "cuda" else {}),
        }  # fmt: skip
        path = self.folder / f"train-{updates}.yaml"
        path.write_text(json.dumps(config), encoding="utf-8")
        return [self.program("onmt_train"), "-config", path]

    def train(self) -> Measured:
        return self.follow(self.command(10**6))

    def decode(self, beam: int, variant: str) -> Measured:
        name = self.folder / f"model_step_{CHECKPOINT_UPDATES}.pt"
        model = self.made(name, self.command(CHECKPOINT_UPDATES))
        output = self.folder / "output.txt"
        command = [
            self.program("onmt_translate"), "-model", model, "-src",
            self.setup.text("test.tok.src"), "-output", output, "-beam_size", str(beam),
            "-batch_size", str(BATCH_SENTENCES), "-batch_type", "sents", "-report_time",
            "-min_length", str(TOKENS - 1), "-max_length", str(TOKENS),
            *(["-gpu", "0"] if self.setup.device == "cuda" else []),
        ]  # fmt: skip
        finished = run(command, self.setup.environment())
        outputs = output.read_text(encoding="utf-8").splitlines()
        rate = self.per_second(r"Total translation time \(s\): ([\d.]+)", finished.output)
        return Measured(rate, finished.peak_mb, {"tokens": self.output_length(outputs)})


class JoeyNmt(Program):
    """JoeyNMT prints target tokens per second since its last report; it has no key/value cache."""

    name, package = "joeynmt", "joeynmt"
    report = r"Tokens per Sec:\s*([\d.,]+)"

    def tokens_of(self, line: str, age: float) -> float | None:
        rate = super().tokens_of(line, age)
        return None if rate is None else rate * age

    def help_command(self) -> list[str | Path]:
        return [self.program("python"), "-m", "joeynmt", "--help"]

    def config(self, name: str, updates: int, beam: int = 1) -> Path:
        size, setup = self.setup.model, self.setup
        side = {
            "num_layers": size.layers, "num_heads": size.heads, "hidden_size": size.d_model,
            "ff_size": size.d_ff, "dropout": size.dropout, "type": "transformer",
            "layer_norm": "post",
            "embeddings": {
                "embedding_dim": size.d_model, "scale": True, "dropout": size.dropout,
            },
        }  # fmt: skip
        vocabulary = {"level": "word", "voc_file": setup.text("dict.joeynmt.txt")}
        config = {
            "name": "bench", "joeynmt_version": "2.3.0",
            "model_dir": str(self.folder / name), "use_cuda": setup.device == "cuda",
            "fp16": False, "random_seed": 1,
            "data": {
                "dataset_type": "plain",
                **{part: setup.text(f"{part}.tok") for part in ("train", "test")},
                "dev": setup.text("valid.tok"),
                "src": {"lang": "src", **vocabulary}, "trg": {"lang": "tgt", **vocabulary},
            },
            "testing": {
                "n_best": 1, "beam_size": beam, "beam_alpha": 1.0, "batch_type": "sentence",
                "batch_size": BATCH_SENTENCES, "min_output_length": TOKENS - 1,
                "max_output_length": TOKENS, "eval_metrics": [], "return_prob": "none",
            },
            "training": {
                "optimizer": "adam", "adam_betas": [0.9, 0.98], "learning_rate": RATE,
                "scheduling": "warmupinversesquareroot", "learning_rate_warmup": WARMUP_STEPS,
                "clip_grad_norm": CLIP, "label_smoothing": SMOOTHING, "loss": "crossentropy",
                "normalization": "tokens", "batch_type": "token", "batch_size": setup.batch_tokens,
                "epochs": 10**6, "updates": updates, "validation_freq": updates,
                "logging_freq": 1, "overwrite": True, "shuffle": True, "keep_best_ckpts": 1,
            },
            "model": {
                "initializer": "xavier_uniform", "embed_initializer": "xavier_uniform",
                "tied_embeddings": True, "tied_softmax": True, "encoder": side, "decoder": side,
            },
        }  # fmt: skip
        path = self.folder / f"{name}-{beam}.yaml"
        path.write_text(json.dumps(config), encoding="utf-8")
        return path

    def command(self, mode: str, config: Path) -> list[str | Path]:
        return [self.program("python"), "-m", "joeynmt", mode, config]

    def train(self) -> Measured:
        config = self.config("train", 10**6)
        return self.follow([*self.command("train", config), "--skip-test"])

    def decode(self, beam: int, variant: str) -> Measured:
        config = self.config("decode", CHECKPOINT_UPDATES)
        command = [*self.command("train", config), "--skip-test"]
        model = self.made(self.folder / "decode" / "latest.ckpt", command)
        output = self.folder / "output"
        config = self.config("decode", CHECKPOINT_UPDATES, beam)
        command = [*self.command("test", config), "-o", output]
        finished = run(command, self.setup.environment())
        outputs = Path(f"{output}.test").read_text(encoding="utf-8").splitlines()
        # The validation text comes first.
        seconds = re.findall(r"Generation took ([\d.,]+)\[sec\]", finished.output)
        if not seconds or not model.exists():
            raise BenchError("joeynmt did not say how long it took")
        rate = self.sentences / number(seconds[-1])
        # Its beam search makes all steps, and then prints a shorter hypothesis.
        tokens = self.output_length(outputs) if beam == 1 else None
        return Measured(rate, finished.peak_mb, {"tokens": tokens})


class Marian(Program):
    """Marian prints the target labels of each update; it has no least length, see `decode`."""

    name, package = "marian", "pymarian"
    report = r"Cost [\d.e+-]+ \* ([\d,]+) @"

    def help_command(self) -> list[str | Path]:
        return [self.program("pymarian"), "--help"]

    def command(self, updates: int) -> list[str | Path]:
        size, setup = self.setup.model, self.setup
        vocabulary = setup.text("dict.marian.yml")
        return [
            self.program("pymarian"), "train", "--type", "transformer",
            "--model", self.folder / f"model-{updates}.npz",
            "--train-sets", setup.text("train.tok.src"), setup.text("train.tok.tgt"),
            "--vocabs", vocabulary, vocabulary, "--tied-embeddings-all",
            "--enc-depth", str(size.layers), "--dec-depth", str(size.layers),
            "--dim-emb", str(size.d_model), "--transformer-dim-ffn", str(size.d_ff),
            "--transformer-heads", str(size.heads), "--transformer-dropout", str(size.dropout),
            "--label-smoothing", str(SMOOTHING), "--clip-norm", str(CLIP),
            "--optimizer-params", "0.9", "0.98", "1e-9", "--learn-rate", str(RATE),
            "--lr-warmup", str(WARMUP_STEPS), "--lr-decay-inv-sqrt", str(WARMUP_STEPS),
            "--mini-batch-words", str(setup.batch_tokens), "--max-length", "256",
            "--maxi-batch", "1000", "--after", f"{updates}u", "--disp-freq", "1u",
            "--seed", "1", "--tempdir", self.folder, *self.device(),
        ]  # fmt: skip

    def device(self) -> list[str]:
        if self.setup.device == "cuda":
            return ["--devices", "0"]
        return ["--cpu-threads", str(self.setup.threads)]

    def train(self) -> Measured:
        # Its own threads share the work; OpenMP's would multiply them.
        return self.follow(self.command(10**6), OMP_NUM_THREADS="1")

    def decode(self, beam: int, variant: str) -> Measured:
        """EOS is made impossible, and the limit is a multiple of the longest source of a batch.

        So the length is right on average only: the speed is that of tokens, in outputs of TOKENS.
        """
        model = self.folder / f"model-{CHECKPOINT_UPDATES}.npz"
        self.made(model, self.command(CHECKPOINT_UPDATES), OMP_NUM_THREADS="1")
        endless = self.folder / "endless.npz"
        ours("forbid_end", self.setup, model=str(model), output=str(endless))
        lengths = sorted(len(line.split()) + 1 for line in self.lines("test.tok.src"))
        starts = range(0, len(lengths), BATCH_SENTENCES)
        widths = [max(lengths[start : start + BATCH_SENTENCES]) for start in starts]
        factor = TOKENS * len(widths) / sum(widths)
        vocabulary = self.setup.text("dict.marian.yml")
        command = [
            self.program("pymarian"), "decode", "--models", endless,
            "--vocabs", vocabulary, vocabulary, "--input", self.setup.text("test.tok.src"),
            "--output", self.folder / "output.txt", "--beam-size", str(beam), "--normalize", "1",
            "--mini-batch", str(BATCH_SENTENCES), "--maxi-batch", "1000", "--maxi-batch-sort",
            "src", "--max-length-factor", f"{factor:.4f}", *self.device(),
        ]  # fmt: skip
        finished = run(command, self.setup.environment(OMP_NUM_THREADS="1"))
        outputs = (self.folder / "output.txt").read_text(encoding="utf-8").splitlines()
        length = sum(len(line.split()) for line in outputs) / len(outputs)
        rate = self.per_second(r"Total time: ([\d.]+)s", finished.output) * length / TOKENS
        return Measured(rate, finished.peak_mb, {"tokens": round(length, 2), "scaled_to": TOKENS})


class CTranslate2(Program):
    """Decoding only, in float32 and int8, of a model written from random numbers."""

    name, package = "ctranslate2", "ctranslate2"
    variants = ("float32", "int8")

    def help_command(self) -> list[str | Path]:
        return [self.program("python"), "-c", "import ctranslate2"]

    def decode(self, beam: int, variant: str) -> Measured:
        model = str(self.folder / "model")
        arguments = {"beam": beam, "compute_type": variant, "model": model}
        command = [
            self.program("python"), HERE / "bench_ct2.py", self.setup.to_json(),
            json.dumps(arguments),
        ]  # fmt: skip
        return self.answered(run(command, self.setup.environment(), separate=True))


class Transformers(Program):
    """MarianMT of transformers, with its trainer and its `generate`: see bench_hf.py."""

    name, package = "transformers", "transformers"
    report = r"^update of (\d+) target tokens"

    def help_command(self) -> list[str | Path]:
        return [self.program("python"), "-c", "from transformers import MarianMTModel"]

    def command(self, task: str, **arguments: Any) -> list[str | Path]:
        script = HERE / "bench_hf.py"
        python = self.program("python")
        return [python, script, task, self.setup.to_json(), json.dumps(arguments)]

    def train(self) -> Measured:
        return self.follow(self.command("train"))

    def decode(self, beam: int, variant: str) -> Measured:
        command = self.command("decode", beam=beam)
        return self.answered(run(command, self.setup.environment(), separate=True))


PEERS: dict[str, type[Program]] = {
    peer.name: peer for peer in (Fairseq, OpenNmtPy, Marian, JoeyNmt, CTranslate2, Transformers)
}
