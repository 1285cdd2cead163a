"""What is made ready before any rank starts: tokenizer and shards. Without torch, so that mistakes show at once."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from data import passes
from data.cache import Console
from data.config import split_weights
from data.packed_source import PackedSource
from data.prepare import prepare as prepare_data
from data.prepared import Prepared, Samples
from data.source import BlendedSource, build_source
from data.token_source import TokenSource
from data.transformed import unchanged
from models.resolve import resolve
from parallel.launch import Identity
from program.buckets.names import is_url
from program.errors import UserError
from training.checkpoint.bucket import stored
from training.checkpoint.folders import checkpoints, find
from training.checkpoint.imported import check_tokenizer
from training.checkpoint.start import has_own
from training.config.run_config import RunConfig
from training.config.stages import of_stage
from training.custom.transform import load_transform
from training.evaluation import validation_sets
from training.evaluation.tasks import PreparedTasks, TaskRequest, prepare_tasks

SHARE_TOLD = 0.05
"""Difference between the shares of tokens and of documents that train from which a line says so."""


def prepare(config: RunConfig, identity: Identity | None, label: str = "") -> Prepared:
    """Tokenizer and shards, found in the cache or made. Under torchrun and srun each process looks them up itself.

    Raises UserError for a checkpoint.load that leads nowhere, or whose weights mean other ids than data.tokenizer's;
    for missing, damaged or empty inputs, those of eval.validation_sets included; for a split too small for one sample;
    for a tokenizer larger than model.vocab_size or without a token of FIM; and for a data.transform that is none.
    """
    load = config.checkpoint.load
    if load is not None and not has_own(checkpoints(Path(config.run_dir or "runs/run")), config.checkpoint):
        stored.find(load, "checkpoint.load") if is_url(load) else find(load)
    check_tokenizer(config)
    speaks = identity is None or identity.local_rank == 0
    say: Console = (lambda text: print(label + text, flush=True)) if speaks else lambda _: None
    prepared = replace(prepare_data(config.data, say), transform=load_transform(config.data.transform))
    resolve(config.model, prepared.tokenizer.vocab_size)
    if config.data.order == "megatron":
        prepared = with_megatrons_order(prepared, config)
    train = unchanged(build_source(prepared, config.data, config.model.seq_length, config.train.seed, "train"))
    _tell_what_trains(train, prepared, config, say)
    _tell_passes(train, prepared, config, say)
    _tell_packing(train, say)
    if config.train.evaluates:
        prepared = validation_sets.prepare_sets(prepared, config, say)
        validation_sets.open_all(prepared, config)
    return prepared


def prepare_later(later: Sequence[RunConfig], identity: Identity | None) -> None:
    """Data of stages to come: what is wrong with it shows now, and not after weeks. Raises UserError as ``prepare``."""
    for stage in later:
        with of_stage(stage):
            prepare(stage, identity, f"stage {stage.own_stage.first.name}: ")


def prepare_eval_tasks(config: RunConfig, identity: Identity | None) -> PreparedTasks | None:
    """Those of ``eval.tasks``, on the process that is or will fork rank 0. Raises UserError as ``prepare_tasks``."""
    if not config.eval.tasks or (identity is not None and identity.rank != 0):
        return None
    return prepare_tasks(TaskRequest.of(config.eval, config.model.seq_length), partial(print, flush=True))


def _tell_what_trains(train: Samples, prepared: Prepared, config: RunConfig, say: Console) -> None:
    """Where documents are few, or far from equal, a share of them is another one of the tokens."""
    total = sum(shard.token_count for shard in prepared.shards)
    if not isinstance(train, TokenSource | BlendedSource) or not total:
        return
    weights = split_weights(config.data.split)
    parts = train.opened if isinstance(train, BlendedSource) else [train]
    held, meant = sum(part.token_count for part in parts) / total, weights[0] / sum(weights)
    if abs(held - meant) > SHARE_TOLD:
        documents = sum(shard.document_count for shard in prepared.shards)
        say(
            f"data: {held:.1%} of the tokens train, not {meant:.1%} as of the documents (data.split), which are few or "
            f"of unequal lengths: {documents:,} in all"
        )


def _tell_passes(train: Samples, prepared: Prepared, config: RunConfig, say: Console) -> None:
    """Where the whole training reads text more than once."""
    if not prepared.streams:
        taken = config.samples  # of this stage alone
        if often := passes.described(train.sources(taken)):
            say(f"data: {config.iterations:,} iterations: {often}")


def _tell_packing(train: Samples, say: Console) -> None:
    parts = zip(train.names, train.opened, strict=True) if isinstance(train, BlendedSource) else [("data.paths", train)]
    for name, part in parts:
        if isinstance(part, PackedSource):
            say(f"data: best-fit packing of {name}: {part.waste}")


def with_megatrons_order(prepared: Prepared, config: RunConfig) -> Prepared:
    """The same data in megatron-core's order, whose plan is that of the whole training."""
    from data.megatron_order import SamplePlan, open_splits  # imports torch and megatron, which the others do later

    train = config.train
    taken = config.batches.consumed_after(train.train_iters)
    given = config.data.megatron_train_samples
    if given is not None and given < taken:
        raise UserError(
            f"data.megatron_train_samples = {given}: fewer than the {taken} that {train.train_iters} iterations take. "
            "Give --train-samples of the run that is continued, or fewer train.train_iters."
        )
    samples = taken if given is None else given
    plan = SamplePlan.from_schedule(
        samples, train.train_iters, train.global_batch_size, train.eval_interval, train.eval_iters
    )
    splits = open_splits(prepared, config.data, config.model.seq_length, train.seed, plan, print)
    return replace(prepared, splits=splits, plan=plan.entries())
