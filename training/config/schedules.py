"""The schedules that a configuration asks for: of the global batch, and of learning rate and weight decay."""

from collections.abc import Callable

from parallel.layout import Layout
from training.config.batch_schedule import BatchSchedule, read_steps
from training.config.divisibility import nearest
from training.config.lr_schedule import Schedule
from training.config.optimizer_config import OptimizerConfig
from training.config.train_config import TrainConfig


def batch_schedule(train: TrainConfig, seq_length: int) -> BatchSchedule:
    """The global batch size as a function of consumed samples; tokens become samples of ``seq_length`` tokens here."""
    steps = None
    if train.step_batch_size_schedule is not None:
        steps = tuple((at // seq_length, size) for at, size in read_steps(train.step_batch_size_schedule))
    return BatchSchedule(
        global_batch_size=train.global_batch_size, rampup_batch_size=train.rampup_batch_size, steps=steps
    )


def learning_schedule(optimizer: OptimizerConfig, train: TrainConfig, seq_length: int) -> Schedule:
    """``curve`` over the whole training."""
    return curve(optimizer, train.train_iters, batch_schedule(train, seq_length).consumed_after)


def curve(optimizer: OptimizerConfig, iterations: int, samples: Callable[[int], int]) -> Schedule:
    """Learning rate and weight decay as functions of consumed samples; iterations and fractions become samples here.

    iterations: that it is made for. samples: how many so many iterations take.
    """
    decay_iters = optimizer.lr_decay_iters or iterations
    decay = optimizer.lr_decay_samples or samples(decay_iters)
    wsd, wsd_iters = optimizer.lr_wsd_decay_samples, optimizer.lr_wsd_decay_iters
    if wsd is None and wsd_iters is None and optimizer.lr_decay_samples:
        wsd = decay // 5
    elif wsd is None:
        wsd_iters = max(1, decay_iters // 5) if wsd_iters is None else wsd_iters
        wsd = samples(max(decay_iters, wsd_iters)) - samples(max(0, decay_iters - wsd_iters))
    warmup: float = optimizer.lr_warmup_samples or samples(optimizer.lr_warmup_iters)
    if optimizer.lr_warmup_fraction is not None:
        warmup = optimizer.lr_warmup_fraction * decay
    start, end, ramp = optimizer.start_weight_decay, optimizer.end_weight_decay, optimizer.weight_decay_incr_samples
    return Schedule(
        lr=optimizer.lr,
        min_lr=optimizer.min_lr,
        lr_decay_style=optimizer.lr_decay_style,
        warmup_samples=warmup,
        decay_samples=decay,
        wsd_decay_samples=wsd,
        lr_wsd_decay_style=optimizer.lr_wsd_decay_style,
        start_weight_decay=optimizer.weight_decay if start is None else start,
        end_weight_decay=optimizer.weight_decay if end is None else end,
        weight_decay_incr_style=optimizer.weight_decay_incr_style,
        weight_decay_samples=samples(iterations) if ramp is None else ramp,
        lr_warmup_init=optimizer.lr_warmup_init,
        lr_decay_power=optimizer.lr_decay_power,
        decoupled_lr=optimizer.decoupled_lr,
        decoupled_min_lr=optimizer.decoupled_min_lr,
    )


def batch_problems(train: TrainConfig, seq_length: int, layout: Layout) -> list[str]:
    """Whether every global batch is a whole number of microbatches, and of an interleaved schedule's rounds."""
    schedule = batch_schedule(train, seq_length)
    found = schedule.problems(train.micro_batch_size, layout.dp)
    if found or layout.vpp == 1:
        return found
    replicas = train.micro_batch_size * layout.dp
    uneven = [size for size in schedule.sizes() if size % (replicas * layout.pp)]
    if uneven:
        found.append(
            f"train.global_batch_size {uneven[-1]} makes {uneven[-1] // replicas} microbatches, which the "
            "interleaved schedule (parallel.virtual_pipeline_model_parallel_size) needs to be a multiple of "
            f"parallel.pipeline_model_parallel_size {layout.pp}. "
            f"Use {nearest(uneven[-1], replicas * layout.pp)} samples."
        )
    return found
