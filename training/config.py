"""The whole configuration: nine sections, each living with the package that reads it. No torch here.

``RunConfig.problems(world_size)`` adds the checks that need more than one section, before any process group starts.
"""

from dataclasses import dataclass, field
from typing import Literal

from data.config import DataConfig
from models.config import ModelConfig
from models.shapes import GPTShape, resolve
from parallel.config import ParallelConfig, PrecisionConfig
from parallel.hatch import hatch_problems
from parallel.layout import Layout, layout_of, world_problems
from parallel.stages import stage_problems
from training.batch_size import BatchSchedule
from training.schedule import Schedule

OWNED_OPTIMIZER_FIELDS = frozenset(
    "optimizer lr min_lr weight_decay adam_beta1 adam_beta2 adam_eps clip_grad bf16 fp16 params_dtype "
    "loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis use_distributed_optimizer "
    "overlap_param_gather".split()
)


@dataclass(kw_only=True, slots=True, frozen=True)
class OptimizerConfig:
    """AdamW and its schedules."""

    lr: float = 3e-4
    """Largest learning rate."""

    min_lr: float = 0.0
    """Learning rate at and after the end of the decay."""

    lr_decay_style: Literal["constant", "linear", "cosine", "WSD", "inverse-square-root"] = "cosine"
    """How the learning rate falls after the warm-up. WSD: warm-up, stable, decay."""

    lr_warmup_iters: int = 0
    """Iterations of linear warm-up from 0."""

    lr_decay_iters: int | None = None
    """Iterations, warm-up included, until min_lr is reached. None: train.train_iters."""

    lr_wsd_decay_iters: int | None = None
    """Iterations of the final decay of WSD. None: a fifth of the whole."""

    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "exponential"
    """Form of WSD's final decay."""

    weight_decay: float = 0.1
    """Decoupled weight decay (arXiv:1711.05101), on matrices only."""

    start_weight_decay: float | None = None
    """Weight decay at the first iteration of a ramp. None: weight_decay."""

    end_weight_decay: float | None = None
    """Weight decay at the end of a ramp. None: weight_decay."""

    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """Form of the ramp from start_weight_decay to end_weight_decay over train_iters."""

    adam_beta1: float = 0.9
    """Decay rate of the first moment."""

    adam_beta2: float = 0.95
    """Decay rate of the second moment."""

    adam_eps: float = 1e-8
    """Added to the root of the second moment."""

    clip_grad: float = 1.0
    """Largest global gradient norm; 0 switches clipping off."""

    megatron: tuple[str, ...] = ()
    """More of mcore's OptimizerConfig, as "field=value" strings."""

    def problems(self) -> list[str]:
        """What is wrong within this section alone."""
        found = []
        if self.lr <= 0 or not 0 <= self.min_lr <= self.lr:
            found.append(f"optimizer: expected 0 <= min_lr <= lr and lr > 0, found min_lr {self.min_lr}, lr {self.lr}.")
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                found.append(f"optimizer.{name} must be in [0, 1), found {getattr(self, name)}.")
        for name in ("lr_warmup_iters", "clip_grad", "weight_decay"):
            if getattr(self, name) < 0:
                found.append(f"optimizer.{name} must not be negative, found {getattr(self, name)}.")
        if self.weight_decay_incr_style != "constant" and None in (self.start_weight_decay, self.end_weight_decay):
            found.append("optimizer.weight_decay_incr_style needs start_weight_decay and end_weight_decay.")
        return found + hatch_problems("optimizer.megatron", self.megatron, OWNED_OPTIMIZER_FIELDS)


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainConfig:
    """How long, in which batches, and what is recomputed."""

    train_iters: int = 1000
    """Optimizer updates until the run is done."""

    exit_interval: int | None = None
    """Save and stop (exit code 0) when the iteration is a multiple of this; schedules stay those of train_iters."""

    global_batch_size: int = 8
    """Samples (windows of seq_length tokens) per optimizer update, over all ranks."""

    micro_batch_size: int = 1
    """Samples per forward pass of one data-parallel replica."""

    rampup_batch_size: tuple[int, int, int] | None = None
    """Grow the global batch: (first size, increment, samples until the full size)."""

    seed: int = 1234
    """Of initial weights, data order and dropout."""

    eval_interval: int | None = None
    """Iterations between evaluations on the validation split. None: never."""

    eval_iters: int = 10
    """Global batches per evaluation."""

    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute activations in the backward pass: full = whole layers, selective = recompute_modules."""

    recompute_method: Literal["uniform", "block"] | None = None
    """full only. uniform: every group of recompute_num_layers layers; block: the first ones of each chunk."""

    recompute_num_layers: int | None = None
    """full only. Transformer layers per group (uniform) or recomputed per chunk (block)."""

    recompute_modules: tuple[Literal["core_attn", "mlp"], ...] = ("core_attn",)
    """selective only. What to recompute."""

    generate_tokens: int = 0
    """Length in tokens of a sample continuation that is printed at the end; 0: none."""

    def problems(self) -> list[str]:
        """What is wrong within this section alone."""
        found = []
        for name in ("train_iters", "exit_interval", "global_batch_size", "micro_batch_size", "eval_interval", "eval_iters"):
            value = getattr(self, name)
            if value is not None and value < 1:
                found.append(f"train.{name} must be 1 or more, found {value}.")
        if not 0 <= self.seed < 2**31:
            found.append(f"train.seed must be in [0, 2^31), found {self.seed}.")
        full = self.recompute_granularity == "full"
        if full and (self.recompute_method is None or self.recompute_num_layers is None):
            found.append('train.recompute_granularity = "full" needs recompute_method and recompute_num_layers.')
        if not full and (self.recompute_method is not None or self.recompute_num_layers is not None):
            found.append('train.recompute_method and recompute_num_layers are for recompute_granularity = "full".')
        return found


@dataclass(kw_only=True, slots=True, frozen=True)
class CheckpointConfig:
    """When checkpoints are written, which are kept, and what a new run starts from."""

    save_interval: int | None = None
    """Iterations between checkpoints. None: only at the end."""

    save_interval_minutes: float | None = None
    """Minutes between checkpoints, whichever of the two comes first."""

    keep: int = 3
    """Newest checkpoints to keep; older ones are deleted after a newer one is complete."""

    load: str | None = None
    """Checkpoint (or folder of checkpoints) to start from where run_dir has none of its own yet."""

    finetune: bool = False
    """Of `load` take the weights only: iteration, data position, optimizer and RNG start anew (Megatron's --finetune)."""

    no_load_optim: bool = False
    """Do not load the optimizer's state."""

    no_load_rng: bool = False
    """Do not load the random-number generators' states."""

    def problems(self) -> list[str]:
        """What is wrong within this section alone."""
        found = []
        if self.save_interval is not None and self.save_interval < 1:
            found.append(f"checkpoint.save_interval must be 1 or more, found {self.save_interval}.")
        if self.save_interval_minutes is not None and self.save_interval_minutes <= 0:
            found.append(f"checkpoint.save_interval_minutes must be above 0, found {self.save_interval_minutes}.")
        if self.keep < 1:
            found.append(f"checkpoint.keep must be 1 or more, found {self.keep}.")
        if self.load is None and (self.finetune or self.no_load_optim):
            found.append("checkpoint.finetune and no_load_optim say how to read checkpoint.load, which is not set.")
        return found


@dataclass(kw_only=True, slots=True, frozen=True)
class LogConfig:
    """What is written about the run, and where."""

    log_interval: int = 10
    """Iterations between lines on the console and in metrics.jsonl."""

    tensorboard: bool = True
    """Write TensorBoard events into run_dir/events."""

    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases; the key comes from the environment and is never written."""

    wandb_project: str = "triplane"
    """Project that the run appears under."""

    wandb_name: str | None = None
    """Name that the run appears under. None: the run folder's name."""

    ranks: Literal["node", "all"] = "node"
    """One log file per node, or one per rank. A failing rank always gets a file of its own."""

    def problems(self) -> list[str]:
        """What is wrong within this section alone."""
        return [] if self.log_interval >= 1 else [f"log.log_interval must be 1 or more, found {self.log_interval}."]


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

    world_size: int | None = None
    """Ranks that --dry_run plans for. None: nproc, else TP x CP x PP."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def layout(self, world_size: int) -> Layout:
        """The layout of ``world_size`` ranks."""
        return layout_of(self.parallel, world_size)

    def problems(self, world_size: int) -> list[str]:
        """Everything that is wrong with this configuration on ``world_size`` ranks; empty when it can run."""
        sections = (self.parallel, self.model, self.precision, self.data, self.optimizer, self.train, self.checkpoint, self.log)
        found = [problem for section in sections for problem in section.problems()]
        if self.nproc is not None and self.nproc < 1:
            found.append(f"nproc must be 1 or more, found {self.nproc}.")
        if found:
            return found
        # The tokenizer's size is not known yet; no split depends on it but the padded vocabulary's, checked below.
        shape = resolve(self.model, tokenizer_vocab_size=1)
        found = shape.problems() + shape_problems(self, shape) + stage_problems(self.parallel, shape.num_layers)
        world = world_problems(self.parallel, world_size)
        return found + (world or batch_problems(self, self.layout(world_size)))


def batch_schedule(train: TrainConfig) -> BatchSchedule:
    """The global batch size as a function of consumed samples."""
    return BatchSchedule(global_batch_size=train.global_batch_size, rampup_batch_size=train.rampup_batch_size)


def learning_schedule(optimizer: OptimizerConfig, train: TrainConfig) -> Schedule:
    """Learning rate and weight decay as functions of consumed samples; iterations become samples here."""
    samples = batch_schedule(train).consumed_after
    decay_iters = optimizer.lr_decay_iters or train.train_iters
    wsd_iters = optimizer.lr_wsd_decay_iters or max(1, decay_iters // 5)
    start, end = optimizer.start_weight_decay, optimizer.end_weight_decay
    return Schedule(
        lr=optimizer.lr,
        min_lr=optimizer.min_lr,
        lr_decay_style=optimizer.lr_decay_style,
        warmup_samples=samples(optimizer.lr_warmup_iters),
        decay_samples=samples(decay_iters),
        wsd_decay_samples=samples(decay_iters) - samples(max(0, decay_iters - wsd_iters)),
        lr_wsd_decay_style=optimizer.lr_wsd_decay_style,
        start_weight_decay=optimizer.weight_decay if start is None else start,
        end_weight_decay=optimizer.weight_decay if end is None else end,
        weight_decay_incr_style=optimizer.weight_decay_incr_style,
        weight_decay_samples=samples(train.train_iters),
    )


def shape_problems(config: RunConfig, shape: GPTShape) -> list[str]:
    """How heads, groups, feed-forward width, sequence and vocabulary divide over TP and CP."""
    parallel, found = config.parallel, []
    tp, cp, heads, groups = parallel.tensor_model_parallel_size, parallel.context_parallel_size, shape.num_attention_heads, shape.num_query_groups
    if heads % tp:
        fits = [size for size in range(1, heads + 1) if heads % size == 0]
        found.append(
            f"model.num_attention_heads {heads} is not divisible by parallel.tensor_model_parallel_size {tp}. "
            f"TP sizes that divide the heads: {', '.join(map(str, fits))}."
        )
    if groups % tp and tp % groups:
        found.append(
            f"model.num_query_groups {groups} neither divides nor is divided by "
            f"parallel.tensor_model_parallel_size {tp}; one of the two must hold."
        )
    if shape.ffn_hidden_size % tp:
        found.append(f"model.ffn_hidden_size {shape.ffn_hidden_size} is not divisible by parallel.tensor_model_parallel_size {tp}.")
    if config.model.make_vocab_size_divisible_by % tp:
        found.append(
            f"model.make_vocab_size_divisible_by {config.model.make_vocab_size_divisible_by} is not divisible by "
            f"parallel.tensor_model_parallel_size {tp}, so the vocabulary cannot be split; use {128 * tp}."
        )
    pieces = (tp if parallel.sequence_parallel else 1) * (2 * cp if cp > 1 else 1)
    if config.model.seq_length % pieces:
        below, above = config.model.seq_length // pieces * pieces, -(-config.model.seq_length // pieces) * pieces
        found.append(
            f"model.seq_length {config.model.seq_length} is not divisible by {pieces} "
            f"(sequence parallel over TP {tp}, context parallel zigzag over 2 x CP {cp}). "
            f"Use {' or '.join(str(size) for size in (below, above) if size)}."
        )
    if shape.position_embedding_type == "learned_absolute" and config.model.seq_length > shape.max_position_embeddings:
        found.append(
            f"model.seq_length {config.model.seq_length} exceeds model.max_position_embeddings "
            f"{shape.max_position_embeddings} of learned positions."
        )
    if parallel.expert_model_parallel_size > 1:
        found.append(f'parallel.expert_model_parallel_size needs a model with experts; "{config.model.shape}" has none.')
    return found


def batch_problems(config: RunConfig, layout: Layout) -> list[str]:
    """Whether every global batch is a whole number of microbatches per replica, and enough of them for VPP."""
    found = batch_schedule(config.train).problems(config.train.micro_batch_size, layout.dp)
    if found or layout.vpp == 1:
        return found
    sizes = {config.train.global_batch_size, (config.train.rampup_batch_size or (config.train.global_batch_size,))[0]}
    for size in sorted(sizes):
        microbatches = size // (config.train.micro_batch_size * layout.dp)
        if microbatches % layout.pp:
            found.append(
                f"train.global_batch_size {size} makes {microbatches} microbatches, which the interleaved schedule needs "
                f"to be a multiple of parallel.pipeline_model_parallel_size {layout.pp}."
            )
    return found
