"""Rewrite a checkpoint offline, on a CPU: Triplane's, Megatron's, PyTorch DCP's or DeepSpeed's.

    python -m tools.reshard SOURCE TARGET [--drop_optimizer] [--dtype bfloat16] [--max_file_size 2GB]
    python -m tools.reshard SOURCE TARGET --make_vocab_size_divisible_by 512
    python -m tools.reshard MEGATRON_FOLDER TARGET --recipe RECIPE.toml
    python -m tools.reshard DCP_FOLDER TARGET --recipe config.json
    python -m tools.reshard SOURCE TARGET --format dcp --names torchtitan
    python -m tools.reshard SOURCE TARGET --format megatron --keys stacked
    python -m tools.reshard SOURCE TARGET --format megatron --optimizer_format dp_reshardable --data_parallel_size 8

A Triplane checkpoint needs no rewriting for other TP, PP, DP or EP sizes: every layout reads it as it is. SOURCE and
TARGET may be URLs of a bucket, s3://BUCKET/PREFIX, by way of TMPDIR. No code in a checkpoint is run, and no pickle is
executed. The same command continues a killed run, but for one into a bucket.
Exit code 2: bad input, or what was compared differs.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from program import command
from program.errors import UserError
from program.flags import at_least_one, parse_flags, size_in_bytes
from tools.reshard import triplane_format
from tools.reshard.checkpoint_source import CheckpointSource
from tools.reshard.dcp import target as dcp_target
from tools.reshard.megatron import target as megatron_target
from tools.reshard.megatron.job import MegatronJob
from tools.reshard.named_weights import Names
from tools.reshard.options import Dtype, Format, Keys, ReshardOptions
from tools.reshard.plan import ReshardPlan
from tools.reshard.rewriting import planned, verify
from tools.reshard.sources import check, open_ours, open_source
from tools.shared import bucket_paths
from tools.shared.held_checkpoint import deleted_is_said
from tools.shared.written import check_new


@dataclass(kw_only=True)
class Reshard:
    """Rewrite a checkpoint."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """A checkpoint; a run's folder or a folder of checkpoints (takes the newest); Megatron's, torch_dist or mp_rank."""
    target: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    """Folder to write; must not exist."""
    format: Format = "triplane"
    """megatron: TARGET/iter_N with latest_checkpointed_iteration.txt beside it, for Megatron-LM's --load TARGET. dcp:
    for torch.distributed.checkpoint.load, FSDP2 and torchtitan."""
    keys: Keys = "per_layer"
    """With --format megatron: per_layer for HybridModel; stacked for GPTModel, per_block for GPTModel with
    non_homogeneous_layers."""
    names: Names = "transformers"
    """With --format dcp: whose parameter names; transformers' are also Accelerate's and Trainer's."""
    job: tyro.conf.OmitArgPrefixes[MegatronJob] = field(default_factory=MegatronJob)
    drop_optimizer: bool = False
    """Weights alone."""
    dtype: Dtype | None = None
    """Round weights to this one; routers' biases stay. None: as they are."""
    vocab_size: int | None = None
    """More token ids: new rows are 0. Rows of ids are never removed."""
    make_vocab_size_divisible_by: int | None = None
    """Pad the vocabulary to a multiple of this, moments included; rows of padding may be dropped."""
    recipe: Path | None = None
    """The model of another program's checkpoint as a recipe (python -m tools.from_megatron makes one of Megatron-LM's
    command line); for PyTorch DCP and DeepSpeed folders also a config.json of Hugging Face's."""
    max_file_size: str = "4GB"
    """Size of the files. A kill loses at most one file per worker."""
    workers: int = 1
    """Processes; each needs about 0.5 GB."""
    verify: bool = False
    """Read the target back and compare every tensor with the source, moments included."""

    def options(self) -> ReshardOptions:
        """Raises UserError."""
        if self.recipe is not None and not self.recipe.is_file():
            raise UserError(f"--recipe {self.recipe}: no such file.")
        if self.format != "megatron" and self.job != MegatronJob():
            raise UserError(
                "a job's sizes are for --format megatron alone: a Triplane checkpoint fits all of them. Leave them out."
            )
        return ReshardOptions(
            format=self.format,
            drop_optimizer=self.drop_optimizer,
            dtype=self.dtype,
            max_file_bytes=size_in_bytes(self.max_file_size),
            vocab_size=self.vocab_size,
            make_vocab_size_divisible_by=self.make_vocab_size_divisible_by,
            keys=self.keys,
            names=self.names,
            job=self.job,
            recipe=self.recipe.resolve() if self.recipe else None,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: done, and verified where asked for; 2: bad input, or what was compared differs."""
    job = parse_flags(Reshard, argv, "python -m tools.reshard", __doc__)
    return bucket_paths.run("tools.reshard", job, reshard, "target", ("source",))


def reshard(job: Reshard) -> None:
    """Raises UserError before anything is written, where the input is bad."""
    options, workers = job.options(), at_least_one(job.workers)
    check_new(job.target)
    source = open_source(job.source, options)
    try:
        with deleted_is_said(source.folder):
            rewritten(job, source, options, workers)
    finally:
        source.files.close()


def rewritten(job: Reshard, source: CheckpointSource, options: ReshardOptions, workers: int) -> None:
    """The target, written and compared as asked for."""
    plan = planned(source, options)
    check(source)
    for note in source.notes:
        print(note, file=sys.stderr)
    write(source, plan, job.target, options, workers)
    print(f"wrote {job.target}: {sum(map(len, plan.groups)):,} tensors, {plan.bytes:,} bytes")
    if job.verify:
        print(compare(source, plan, job.target, options))


def write(source: CheckpointSource, plan: ReshardPlan, target: Path, options: ReshardOptions, workers: int) -> None:
    """In the form that is asked for."""
    forms = {"megatron": megatron_target, "dcp": dcp_target, "triplane": triplane_format}
    forms[options.format].write(source, plan, target, options, workers)


def compare(source: CheckpointSource, plan: ReshardPlan, target: Path, options: ReshardOptions) -> str:
    """A sentence on what was compared. Raises UserError where something differs."""
    if options.format == "triplane":
        files = open_ours(target).files
    else:
        files = (megatron_target if options.format == "megatron" else dcp_target).reader(target)
    try:
        return verify(source, plan, files, target)
    finally:
        files.close()


if __name__ == "__main__":
    raise SystemExit(command.run("tools.reshard", main))
