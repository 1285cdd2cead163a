"""The flags of each subcommand of tools.plan."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from parallel.launch import MOST_RANKS
from program.limits import too_small
from tools.plan.search.request import AXES

LARGEST = {"num_gpus": MOST_RANKS, "global_batch_size": (1 << 31) - 1, "seq_length": 1 << 27, "mbs": 1 << 24}
"""Of the axes of a layout, MOST_RANKS: what is beyond is a typing mistake, and would be counted through for hours."""
Figure = Literal["memory", "smallest", "clusters"]


@dataclass(kw_only=True, slots=True, frozen=True)
class RequestFlags:
    """What is planned: model, cluster, GPUs, batch, and sizes that are decided already."""

    model: str | None = None
    """Architecture by name, such as llama3_70b (models/families)."""

    recipe: Path | None = None
    """TOML recipe to take model, batch and sequence length from, and to write the rest of back."""

    cluster: str = "h100_ib"
    """A file of slurm/clusters by its name, or the path of one of your own."""

    num_gpus: int | None = None
    """GPUs of the run."""

    global_batch_size: int | None = None
    """Samples of an optimizer update, over all GPUs. None: the recipe's."""

    seq_length: int | None = None
    """Tokens of a sample. None: the recipe's, else 4096, or the positions that the model has learned."""

    tp: int | None = None
    """Only this tensor_model_parallel_size; so with the following."""

    pp: int | None = None
    """pipeline_model_parallel_size."""

    vpp: int | None = None
    """virtual_pipeline_model_parallel_size; 1: no interleaving."""

    cp: int | None = None
    """context_parallel_size."""

    ep: int | None = None
    """expert_model_parallel_size."""

    etp: int | None = None
    """expert_tensor_parallel_size."""

    dp: int | None = None
    """Replicas of the model."""

    mbs: int | None = None
    """micro_batch_size."""

    recompute: str | None = None
    """none, mlp, moe or full."""

    zero: int | None = None
    """0: no distributed optimizer; 1: with it; 2 and 3: gradients, and weights, sharded too. None: 1 and 3, and 2 where
    1 does not fit."""

    copies: int | None = None
    """num_distributed_optimizer_instances: groups of ranks that each hold all shards (HSDP); with ZeRO-2 and -3. None:
    1, and as many as keep each within a domain of the scale-up links."""

    sequence_parallel: bool | None = None
    """False: plan without sequence parallelism. None: with it wherever TP is above 1."""

    overlap: bool | None = None
    """False: plan with gradients reduced, and weights gathered, while nothing computes. None: beside computation."""

    precision: str | None = None
    """bf16, fp16, fp32, fp8 or nvfp4, as the card has them. None: bf16 and fp8; fp16 or fp32 on cards without bf16."""

    def problems(self) -> Iterator[str]:
        """Values that no flag has."""
        for name in {**LARGEST, **dict.fromkeys(AXES)}:
            most, size = LARGEST.get(name, MOST_RANKS), getattr(self, name)
            if isinstance(size, int) and size > most:
                yield f"--{name} must be at most {most:,}, found {size if size < 10**30 else 'a larger number'}."


@dataclass(kw_only=True, slots=True, frozen=True)
class SearchFlags(RequestFlags):
    """Price every legal layout; show the best."""

    top: int = 10
    """Layouts to show."""

    write: Path | None = None
    """Write the chosen layout as a recipe here: the fields that are not at their defaults."""

    full: bool = False
    """With --write: all fields."""

    tokens: float | None = None
    """Tokens to train on: days and cost of that; with --write, train_iters and save_interval of the recipe."""

    report: Path | None = None
    """Write everything as one HTML file with pictures."""

    def problems(self) -> Iterator[str]:
        """Values that no flag has."""
        yield from (*RequestFlags.problems(self), *too_small(self, "--", 1, "top"))
        if self.tokens is not None and not 0 < self.tokens < math.inf:
            yield f"--tokens must be above 0, and finite, found {self.tokens:g}."


@dataclass(kw_only=True, slots=True, frozen=True)
class ExplainFlags(SearchFlags):
    """Explain one layout, against the best of all, or why it is rejected."""

    layout: tyro.conf.Positional[str]
    """Sizes of the layout: TP=8,PP=4. The planner chooses the rest."""


@dataclass(kw_only=True, slots=True, frozen=True)
class SizeFlags(RequestFlags):
    """How many GPUs, and of which cluster."""

    show: tuple[Figure, ...] = ("memory", "smallest", "clusters")
    """memory: a table of weights, gradients and optimizer by number format and ZeRO stage, checkpoint size and
    interval; smallest: the fewest GPUs of this cluster, and of each other, that hold the model; clusters: the same run
    on every other cluster for no more money per hour: fewer, larger cards or many small ones."""


@dataclass(kw_only=True, slots=True, frozen=True)
class StagesFlags(RequestFlags):
    """Price each [[stage]] of a recipe, and the whole run."""

    layouts: Literal["recipe", "best"] = "recipe"
    """recipe: the sizes of TP, PP, VPP, CP, EP and the micro-batch that hold in each stage, and its number format.
    best: what the planner finds for it."""


@dataclass(kw_only=True, slots=True, frozen=True)
class TraceFlags(RequestFlags):
    """Count the bytes and collectives of the best layouts exactly. Needs torch."""

    layouts: int = 3
    """Run the real program of so many of the best layouts, with tensors without values."""

    def problems(self) -> Iterator[str]:
        """Values that no flag has."""
        yield from (*RequestFlags.problems(self), *too_small(self, "--", 1, "layouts"))


@dataclass(kw_only=True, slots=True, frozen=True)
class CalibrateFlags:
    """Measure this machine's matrix products, memory and collectives. Needs torch."""

    output: tyro.conf.Positional[Path]
    """The cluster file to write; under srun or torchrun, from measurements over all ranks (slurm/calibrate.sbatch)."""


@dataclass(kw_only=True, slots=True, frozen=True)
class CompareFlags(RequestFlags):
    """Run pretrain_gpt.py here in a few layouts (one rank, then all DP, TP or PP) of --num_gpus ranks, for 12 steps
    each, and print predicted against measured time. --cluster: a file that ``calibrate`` wrote here; without --model,
    the demo's."""


@dataclass(kw_only=True, slots=True, frozen=True)
class BacktestFlags:
    """Hold the planner against published runs."""

    runs: tyro.conf.Positional[Path | None] = None
    """CSV with the columns of tests/planner/published.csv (None: that one), or Megatron's names for them. What is
    empty comes from the model's name."""

    output: Path | None = None
    """Write a prediction for every row here."""

    cross_validate: bool = False
    """Also predict each layout, and each cluster, by constants fitted without it (minutes)."""

    refit: bool = False
    """Fit the constants again and keep them."""
