"""The flags of tools.plan."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(kw_only=True, slots=True, frozen=True)
class Flags:
    """Plan a run."""

    model: str | None = None
    """Architecture by name, such as llama3_70b (models/families.py)."""

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
    """0: no distributed optimizer; 1: with it; 2, 3: sharded gradients, and weights, too, which today's program does
    not run. None: 1 and 3, and 2 where 1 does not fit."""

    sequence_parallel: bool | None = None
    """False: plan without sequence parallelism. None: with it wherever TP is above 1."""

    overlap: bool | None = None
    """False: plan with gradients reduced, and weights gathered, while nothing computes. None: beside computation."""

    precision: str | None = None
    """bf16, fp16, fp32 or fp8, as the card has them. None: bf16 and fp8; fp16 or fp32 on cards without bf16."""

    top: int = 10
    """Layouts to show."""

    explain: str | None = None
    """Explain a layout, or its rejection: TP=8,PP=4."""

    write: Path | None = None
    """Write the best layout (or that of --explain) as a recipe here."""

    tokens: float | None = None
    """Tokens to train on: days and cost of that; with --write, train_iters and save_interval of the recipe."""

    smallest: bool = False
    """The fewest GPUs of this cluster, and of each other, that hold the model."""

    sizing: bool = False
    """The same run on every other cluster for no more money per hour: fewer, larger cards or many small ones."""

    memory: bool = False
    """Table of weights, gradients and optimizer by number format and ZeRO stage; checkpoint size and interval."""

    report: Path | None = None
    """Write everything as one HTML file with pictures."""

    trace: int = 0
    """Run the real program of the best so many layouts, with tensors without values, for exact memory. Needs torch."""

    calibrate: Path | None = None
    """Measure this machine's matrix products, memory and collectives into a cluster file; under srun or torchrun, over
    all its ranks (slurm/calibrate.sbatch). Needs torch."""

    compare: bool = False
    """Run pretrain_gpt.py here in a few layouts (one rank, then all DP, TP or PP) of --num_gpus ranks, for 12 steps
    each, and print predicted against measured time. --cluster: a file that --calibrate wrote here; without --model,
    the demo's."""

    backtest: Path | None = None
    """CSV of published runs to hold the planner against: tools/plan/backtest/published.csv, or one of yours with the
    same columns, or Megatron's names for them. What is empty comes from the model's name."""

    output: Path | None = None
    """With --backtest: write a prediction for every row here."""

    cross_validate: bool = False
    """With --backtest: also predict each layout, and each cluster, by constants fitted without it (minutes)."""

    refit: bool = False
    """With --backtest: fit the constants again and keep them."""
