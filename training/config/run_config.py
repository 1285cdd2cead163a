"""The whole configuration: its sections, each living with the package that reads it.

``RunConfig.problems(world_size)`` adds the checks that need several sections, before any group starts.
"""

import itertools
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any, Literal

from data.config import DataConfig
from models.config import ModelConfig
from models.kernels import KernelsConfig, KernelSetting, kernel_problems
from models.resolve import resolve
from models.shape_problems import shape_problems
from models.shapes import GPTShape
from parallel.config import ParallelConfig, PrecisionConfig
from parallel.layout import Layout, layout_of, world_problems
from parallel.megatron_fields import parse
from parallel.nccl_options import nccl_problems
from parallel.stages import stage_problems
from program.limits import too_small
from training.config import divisibility, incompatible
from training.config.activation_offload import fine_grained_problems, offload_number_problems
from training.config.batch_schedule import BatchSchedule
from training.config.checkpoint_config import CheckpointConfig
from training.config.import_path import form_problems
from training.config.log_config import LogConfig
from training.config.lr_schedule import Schedule
from training.config.optimizer_config import OptimizerConfig, state_problems
from training.config.ranges import range_problems
from training.config.schedules import batch_problems, batch_schedule, learning_schedule
from training.config.small_sections import EvalConfig, FaultConfig, ProfileConfig, profile_problems, validation_problems
from training.config.stage_config import WHOLE_RUN, Begin, StageConfig
from training.config.train_config import TrainConfig


@dataclass(kw_only=True, slots=True, frozen=True)
class RunConfig:
    """Pretrain a GPT on megatron-core, with tensor, pipeline and data parallelism."""

    run_dir: str | None = None
    """The run's folder; an existing one is resumed. None: runs/NAME after the recipe's file name."""

    nproc: int | None = None
    """Local ranks to start; ignored under torchrun and srun. None: the number of GPUs, else TP x CP x PP."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where the node has GPUs (an unusable GPU is an error), else cpu."""

    dry_run: bool = False
    """Print what would run (configuration, rank grid, stages, memory, warnings) and exit."""

    debug: bool = False
    """Small, slow and talkative: one microbatch, deterministic, no overlap, synchronous checkpoints, checks in every
    iteration. Prints what it changes; other flags win over it."""

    world_size: int | None = None
    """Ranks that --dry_run plans for. None: nproc, else TP x CP x PP."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    fault: FaultConfig = field(default_factory=FaultConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    stage: tuple[StageConfig, ...] = ()
    """``[[stage]]`` tables, in a recipe only: parts of the run that change something (training/config/stages.py)."""

    begin: Begin | None = None
    """Of the configuration of one stage, and never given: where it takes over."""

    @property
    def import_paths(self) -> list[str]:
        """The user's own callbacks, loss, optimizer and transformation of samples."""
        return [
            *self.train.callbacks,
            *(path for path in (self.train.loss, self.data.transform) if path is not None),
            *([self.optimizer.optimizer] if ":" in self.optimizer.optimizer else []),
        ]

    @property
    def own_stage(self) -> Begin:
        """``begin``; of a run without stages, one that is all of it."""
        return self.begin or WHOLE_RUN

    @property
    def batches(self) -> BatchSchedule:
        """Of the global batch, by consumed samples."""
        return batch_schedule(self.train, self.model.seq_length)

    @property
    def iterations(self) -> int:
        """Of the run, or of its stage alone."""
        return self.train.train_iters - self.own_stage.first.iteration

    @property
    def samples(self) -> int:
        """That ``iterations`` take."""
        before = self.own_stage.first.samples
        return self.batches.consumed_after(self.iterations, before) - before

    @property
    def schedule(self) -> Schedule:
        """Of learning rate and weight decay, from where their curve begins."""
        found = learning_schedule(self.optimizer, self.train, self.model.seq_length)
        return replace(found, begins_at=self.own_stage.curve.samples)

    def tokens_of(self, samples: int) -> int:
        """Tokens of the first ``samples`` samples of the run, the last of which are this configuration's."""
        first = self.own_stage.first
        return first.tokens + (samples - first.samples) * self.model.seq_length

    def layout(self, world_size: int) -> Layout:
        """The layout of ``world_size`` ranks."""
        return layout_of(self.parallel, world_size)

    def problems(self, world_size: int) -> list[str]:
        """Everything that is wrong with this configuration on ``world_size`` ranks; empty when it can run.

        What needs several sections is looked at where these are sound by themselves.
        """
        out_of_range = range_problems(self)
        if out_of_range:  # what counts through such numbers must not see them
            return out_of_range
        found = {name: section.problems() for name, section in self._sections().items()}
        sound = {name for name, problems in found.items() if not problems}
        problems = [*self._own_problems(), *itertools.chain.from_iterable(found.values())]
        if "model" in sound:
            problems += self._shape_problems(with_parallel="parallel" in sound)
        if {"data", "eval"} <= sound and self.train.evaluates:
            problems += validation_problems(self.eval, self.data)
        layout = Layout()
        if "parallel" in sound and world_size >= 1:
            world = world_problems(self.parallel, world_size)
            problems += world
            layout = layout if world else self.layout(world_size)
            if not world and "profile" in sound:
                problems += profile_problems(self.profile, layout, self.device, elastic=self.parallel.elastic)
        if "train" in sound and self.model.seq_length > 0:  # by which tokens become samples
            batch = batch_problems(self.train, self.model.seq_length, layout)
            problems += batch
            if not batch and "optimizer" in sound:
                problems += self.schedule.problems()
        return problems

    def _sections(self) -> dict[str, Any]:
        hints = typing.get_type_hints(type(self))
        return {name: getattr(self, name) for name, hint in hints.items() if is_dataclass(hint)}

    def _own_problems(self) -> list[str]:
        """What is wrong with the fields that are in no section."""
        found = too_small(self, "", 1, "nproc", "world_size")
        found += form_problems("data.transform", self.data.transform) if self.data.transform is not None else []
        if self.world_size is not None and not self.dry_run:
            found.append("world_size is what --dry_run plans for; a run takes its ranks from nproc, torchrun or srun.")
        return found

    def _shape_problems(self, with_parallel: bool) -> list[str]:
        """What is wrong with the shape; with_parallel: and with how it divides over the ranks."""
        shape = resolve(self.model, None)  # not yet with the tokenizer's vocabulary; nothing here depends on it
        found = shape_problems(shape) + incompatible.mtp_problems(shape, self.data.reset_attention_mask)
        found += incompatible.mup_problems(shape, self.optimizer.optimizer)
        found += incompatible.qk_clip_problems(shape, self.optimizer, self.kernels, parse(self.model.megatron))
        if self.train.recompute_granularity == "selective":
            found += incompatible.recompute_problems(shape, self.train.recompute_modules, self.device)
        found += offload_number_problems(self.model.megatron)
        found += incompatible.block_recompute_problems(shape, self.train.recompute_method)
        if with_parallel:
            found += stage_problems(self.parallel, shape.num_layers, shape.mtp_num_layers)
            found += divisibility.split_problems(shape, self.parallel.tensor_model_parallel_size)
            found += divisibility.sequence_problems(self.model, shape, self.parallel)
            found += divisibility.latent_problems(shape, self.parallel.tensor_model_parallel_size)
            found += divisibility.context_problems(shape, self.parallel)
            found += incompatible.dispatcher_problems(self.parallel, self.device)
            found += incompatible.buffer_problems(shape, self.parallel)
            found += incompatible.sharding_problems(
                self.parallel, self.precision, graphs=self.kernels.graphs, userbuffers=self.kernels.tp_comm_overlap
            )
            found += nccl_problems(self.parallel, self.device != "cpu")
            found += kernel_problems(self.kernels, kernel_setting(self, shape, self.device != "cpu"))
            found += state_problems(self.optimizer, self.parallel, self.precision, cuda=self.device != "cpu")
            found += incompatible.offload_problems(
                self.train.cpu_offloading_num_layers, self.precision, self.kernels.graphs
            )
            found += fine_grained_problems(shape, self.precision, self.kernels, self.train, self.device)
            if self.train.compile:
                found += incompatible.compile_problems(self.precision, self.kernels.graphs)
            if self.kernels.graphs:
                found += incompatible.graph_problems(
                    shape, self.parallel, self.precision,
                    by_document=self.data.by_document,
                    recomputes=self.train.recomputes,
                    ramp=self.train.changes_batch,
                    userbuffers=self.kernels.tp_comm_overlap,
                )  # fmt: skip
            if not self.data.by_document:  # else attention is ours everywhere
                found += incompatible.exchange_problems(shape, self.parallel, self.device)
            found += divisibility.expert_problems(shape, self.parallel)
            if self.device != "cpu":  # where fp8 and fp4 are off
                micro = self.train.micro_batch_size
                found += divisibility.fp8_problems(self.model, shape, self.parallel, self.precision, micro)
                may_be = "full" if self.train.recompute_budget is not None else self.train.recompute_granularity
                found += incompatible.scale_problems(shape, self.precision, may_be)
                found += incompatible.param_gather_problems(self.parallel, self.precision)
        return found


def with_fields(config: RunConfig, fields: Mapping[str, Any]) -> RunConfig:
    """With some fields set, by their dotted names."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in fields.items():
        section, _, field = name.partition(".")
        sections.setdefault(section, {})[field] = value
    return replace(config, **{name: replace(getattr(config, name), **values) for name, values in sections.items()})


def kernel_setting(
    config: RunConfig, shape: GPTShape, cuda: bool, transformer_engine: bool | None = None
) -> KernelSetting:
    """transformer_engine: whether it is there; None: as far as is known before a rank starts, which has a GPU."""
    return KernelSetting(
        cuda=cuda,
        transformer_engine=cuda if transformer_engine is None else transformer_engine,
        dtype=config.precision.dtype,
        fp4=config.precision.fp4 is not None,
        shape=shape,
        parallel=config.parallel,
        megatron=frozenset(parse(config.model.megatron)),
        recomputes_shared_experts=config.train.recompute_granularity == "selective"
        and "shared_experts" in config.train.recompute_modules,
        own_loss=config.train.loss is not None,
        rope_restarts=config.data.restarts_alone,
        deterministic=config.train.deterministic_mode,
    )
