#!/usr/bin/env python3
"""Plans of large trainings: memory, time and cost, computed from models and named assumptions.

    scripts/scale_plans.py                         # rewrites the tables of docs/scale.md
    scripts/scale_plans.py --show --price 4        # prints them instead, under other assumptions

FLOPs are those of `mttrain/flops.py`, bytes those of `mttrain/memory.py`. What these cannot know
stands in `Assumptions`; nothing here was measured. A table stands between `<!-- table: NAME -->`
and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
if str(PROJECT) not in sys.path:
    sys.path.insert(0, str(PROJECT))

from mttrain.config import ModelConfig, load_config  # noqa: E402
from mttrain.flops import LengthSums, model_products  # noqa: E402
from mttrain.memory import (  # noqa: E402
    BatchShape,
    Memory,
    Setting,
    Sizes,
    readable,
    training_memory,
)

PAGE = PROJECT / "docs" / "scale.md"
TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
GPUS_PER_NODE = 8
HALF, FULL = 2, 4  # bytes of a number in products, and of a weight or gradient
BACKWARD_SHARE = 2 / 3  # of the time of an update, in which gradients can be exchanged


@dataclass(frozen=True)
class Assumptions:
    """What no model of ours knows; each field is an option of the command line."""

    peak: float = 989e12
    memory: float = 80e9
    price: float = 2.5
    small: float = 0.1
    medium: float = 0.2
    large: float = 0.35
    launch: float = 0.025
    inside: float = 450e9
    between: float = 50e9
    length: int = 30
    longest: int = 256
    padding: float = 0.05

    def utilisation(self, d_model: int) -> float:
        """Share of the peak that a model of this width reaches."""
        return self.small if d_model <= 512 else self.medium if d_model <= 1024 else self.large


MEANING = {
    "peak": ("FLOP/s of a GPU in bfloat16, dense", "data sheet of the NVIDIA H100 SXM"),
    "memory": ("bytes of memory of a GPU", "the same"),
    "price": ("US dollars for an hour of one GPU", "assumed"),
    "small": ("utilisation, share of the peak, at d_model 512", "assumed"),
    "medium": ("utilisation at d_model 1024", "assumed"),
    "large": ("utilisation at larger d_model", "assumed"),
    "launch": (
        "seconds that a batch takes at least, its kernels being started one by one",
        "assumed",
    ),
    "inside": ("bytes/s of a GPU to others of its node, each way", "data sheet, NVLink"),
    "between": ("bytes/s of a GPU to other nodes, each way", "assumed: 400 Gbit/s for each GPU"),
    "length": ("subwords of a sentence on each side, EOS included", "assumed"),
    "longest": ("subwords of the longest pairs, for memory", "`data.max_length` of the configs"),
    "padding": ("share of padding in a batch", "assumed"),
}


@dataclass(frozen=True)
class Plan:
    """One training. target_tokens: in all, without padding; batch_tokens: padded, of each side, on
    each process; sharded: fully sharded with activation checkpointing, else replicated."""

    name: str
    model: ModelConfig
    vocab: int
    nodes: int
    target_tokens: float
    batch_tokens: int
    accumulate: int
    assumed: Assumptions
    sharded: bool = False

    @property
    def gpus(self) -> int:
        return GPUS_PER_NODE * self.nodes

    @property
    def tokens_per_update(self) -> float:
        """Target tokens without padding, of all processes."""
        return self.batch_tokens * self.accumulate * self.gpus * (1 - self.assumed.padding)

    @property
    def updates(self) -> float:
        return self.target_tokens / self.tokens_per_update

    @property
    def flops_per_token(self) -> float:
        """For each target token and the source token that comes with it."""
        n, length = 1000, self.assumed.length
        sums = LengthSums(n, n, n * length, n * length, n * length)
        return model_products(self.model, self.vocab).training(sums) / n

    @property
    def compute(self) -> float:
        """Seconds of the batches of an update, on each of the GPUs at once."""
        speed = self.gpus * self.assumed.peak * self.assumed.utilisation(self.model.d_model)
        # Padding takes its share of the time, which a measured utilisation has in it.
        products = self.tokens_per_update * self.flops_per_token / speed
        return max(products, self.accumulate * self.assumed.launch)

    @property
    def exchange(self) -> float:
        """Seconds that a ring of all GPUs needs for gradients, and for weights when they are
        sharded, of one update, if nothing else is done."""
        parameters = self.sizes.total
        around = (self.gpus - 1) / self.gpus
        speed = self.assumed.inside if self.nodes == 1 else self.assumed.between
        if self.sharded:  # weights gathered for forward and for backward, gradients scattered
            return around * parameters * 3 * FULL * self.accumulate / speed
        return 2 * around * parameters * FULL / speed

    @property
    def seconds(self) -> float:
        """Of an update: what is exchanged while gradients are computed costs nothing."""
        hidden = self.compute
        if not self.sharded:  # only the last of the accumulated batches exchanges
            hidden *= BACKWARD_SHARE / self.accumulate
        return self.compute + max(0.0, self.exchange - hidden)

    @property
    def hours(self) -> float:
        return self.updates * self.seconds / 3600

    @property
    def cost(self) -> float:
        return self.hours * self.gpus * self.assumed.price

    @cached_property
    def sizes(self) -> Sizes:
        return Sizes.of(self.model, self.vocab, self.vocab)

    @cached_property
    def memory(self) -> Memory:
        """Of a process, for batches of usual or of the longest pairs, whichever take more."""
        setting = Setting(
            self.model,
            self.vocab,
            self.vocab,
            narrow=HALF,
            shards=self.gpus if self.sharded else 1,
            recompute=self.sharded,
        )
        shapes = (
            BatchShape(self.batch_tokens // length, length, length)
            for length in (self.assumed.length, self.assumed.longest)
        )
        return max((training_memory(setting, shape) for shape in shapes), key=lambda m: m.total)


def plans(assumed: Assumptions) -> list[Plan]:
    """The plans of the page. The paper's 25,000 tokens an update leave little work to each of many
    GPUs; with four nodes an update takes sixteen times as many (Ott et al. 2018)."""
    base, big = (
        load_config(PROJECT / "configs" / f"wmt14_en_de_{name}.yaml") for name in ("base", "big")
    )
    billion = ModelConfig(
        d_model=2048, d_ff=8192, num_heads=16, encoder_layers=8, decoder_layers=8, norm="pre",
        dropout=0.1,
    )  # fmt: skip
    found = []
    for name, config in (("WMT14 en-de, base", base), ("WMT14 en-de, big", big)):
        assert config.train.max_steps is not None and config.train.padded_tokens is not None
        update = config.train.padded_tokens * config.train.accumulate * (1 - assumed.padding)
        total = config.train.max_steps * update
        vocab = config.tokenizer.vocab_size
        for nodes, batch in ((1, 3200), (4, 12800)):
            found.append(Plan(name, config.model, vocab, nodes, total, batch, 1, assumed))
    corpus = 100e6 * assumed.length
    for nodes, accumulate in ((1, 4), (4, 1)):
        found.append(
            Plan(
                "100 million pairs, big, 3 epochs", big.model, 32000, nodes, 3 * corpus, 12800,
                accumulate, assumed,
            )
        )  # fmt: skip
    for nodes, accumulate in ((1, 4), (4, 1)):
        found.append(
            Plan(
                "100 million pairs, a billion parameters, 3 epochs", billion, 32000, nodes,
                3 * corpus, 12800, accumulate, assumed, sharded=True,
            )
        )  # fmt: skip
    return found


# ---- tables ------------------------------------------------------------------------------------


def tables(assumed: Assumptions) -> dict[str, str]:
    """Name -> the table of that name."""
    chosen = plans(assumed)
    return {
        "assumptions": table(
            ("option", "value", "what it is", "where it is from"),
            [
                (f"`--{f.name}`", f"{getattr(assumed, f.name):g}", *MEANING[f.name])
                for f in fields(assumed)
            ],
        ),
        "memory": table(
            ("plan", "GPUs", "parameters", "batch on a GPU", "weights, gradients, moments",
             "activations", "the rest", "all", "fits"),
            [memory_row(plan) for plan in chosen],
        ),
        "time": table(
            ("plan", "GPUs", "target tokens an update", "updates", "FLOPs a token", "FLOPs in all",
             "batches of an update", "exchange alone", "time", "GPU-hours", "cost"),
            [time_row(plan) for plan in chosen],
        ),
    }  # fmt: skip


def memory_row(plan: Plan) -> tuple[str, ...]:
    memory = plan.memory
    state = memory.weights + memory.gradients + memory.moments
    rest = memory.average + memory.copies + memory.working
    return (
        plan.name + (", sharded" if plan.sharded else ""),
        str(plan.gpus),
        f"{plan.sizes.total / 1e6:,.0f} M",
        f"{plan.batch_tokens:,}" + (f" x {plan.accumulate}" if plan.accumulate > 1 else ""),
        *(readable(size) for size in (state, memory.activations, rest, memory.total)),
        "yes" if memory.total <= plan.assumed.memory else "**no**",
    )


def time_row(plan: Plan) -> tuple[str, ...]:
    return (
        plan.name,
        str(plan.gpus),
        f"{plan.tokens_per_update:,.0f}",
        f"{plan.updates:,.0f}",
        f"{plan.flops_per_token:.2e}",
        f"{plan.flops_per_token * plan.target_tokens:.2e}",
        f"{1000 * plan.compute:.1f} ms",
        f"{1000 * plan.exchange:.1f} ms",
        f"{plan.hours:.1f} h" if plan.hours >= 1 else f"{60 * plan.hours:.0f} min",
        f"{plan.hours * plan.gpus:,.0f}",
        f"${plan.cost:,.0f}",
    )


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def render(page: str, assumed: Assumptions) -> str:
    """The page with its tables brought up to date; KeyError for a name that there is none of."""
    found = tables(assumed)
    return TABLE.sub(lambda match: match[1] + found[match[2]] + match[3], page)


def main() -> int:
    parser = argparse.ArgumentParser(description="Plans of large trainings.")
    parser.add_argument("--show", action="store_true", help="print the tables, write nothing")
    for item in fields(Assumptions):
        kind = int if isinstance(item.default, int) else float
        parser.add_argument(
            f"--{item.name}", type=kind, default=item.default, metavar="X",
            help=f"{MEANING[item.name][0]} (default: %(default)g)",
        )  # fmt: skip
    arguments = vars(parser.parse_args())
    show = arguments.pop("show")
    assumed = replace(Assumptions(), **arguments)
    if show:
        print("\n".join(tables(assumed).values()), end="")
    elif assumed != Assumptions():
        parser.error("the page holds the plans under the default assumptions; use --show")
    else:
        PAGE.write_text(render(PAGE.read_text(encoding="utf-8"), assumed), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
