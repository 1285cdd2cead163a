"""From a recipe with ``[[stage]]`` tables to one configuration for each stage.

A stage change is what a resume is: the stage before ends with a checkpoint, and the next one continues it with its own
configuration, in new processes. So whatever a resume may change a stage may, and nothing else of the run knows stages:
each configuration made here is an ordinary one, with lengths in samples and with ``begin``, where it takes over.
"""

import typing
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from program.errors import SharedMistake
from program.schema import structured
from training.config.batch_schedule import BatchSchedule
from training.config.optimizer_config import OptimizerConfig
from training.config.recipe import did_you_mean, sections
from training.config.run_config import RunConfig
from training.config.schedules import batch_schedule, curve
from training.config.stage_config import Begin, StageConfig
from training.config.train_config import TrainConfig

MODEL = frozenset({
    "seq_length", "rotary_base", "rotary_base_local", "rope_scaling", "rope_scaling_factor", "rope_low_freq_factor",
    "rope_high_freq_factor", "rope_original_max_position_embeddings", "rope_attention_factor", "rope_short_factor",
    "rope_long_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "hidden_dropout", "attention_dropout",
})  # fmt: skip
"""Of the model: what no weight's shape or meaning depends on."""
NEVER = {
    "precision": ("dtype",),
    "data": ("tokenizer", "eod_token", "builtin_vocab_size", "order", "megatron_train_samples"),
    "optimizer": ("optimizer", "lr_warmup_samples", "lr_decay_samples", "lr_wsd_decay_samples"),
    "train": ("train_iters", "decay_from", "decay_iters", "seed", "step_batch_size_schedule", "ema_decay",
              "average_last", "loss"),
    "checkpoint": ("load", "finetune"),
}  # fmt: skip
"""Of other sections: what holds for the whole run, or is counted from its beginning."""
TEXTS = ("paths", "blend", "blend_file", "stream")
"""Of which a stage that gives one leaves the others out."""
CURVE = frozenset({
    "lr", "min_lr", "lr_decay_style", "lr_decay_power", "decoupled_lr", "decoupled_min_lr", "lr_warmup_iters",
    "lr_warmup_fraction", "lr_warmup_init", "lr_decay_iters", "lr_wsd_decay_iters", "lr_wsd_decay_style",
    "weight_decay", "start_weight_decay", "end_weight_decay", "weight_decay_incr_style", "weight_decay_incr_samples",
})  # fmt: skip
"""Of the optimizer: with one of these a curve of learning rate and weight decay begins, at the stage's first sample."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Stage:
    """A stretch of a run, and the configuration that holds in it."""

    config: RunConfig
    """Ordinary: without ``[[stage]]``, with ``begin``, and with ``train.train_iters`` at the stage's end."""
    begin: Begin
    iterations: int
    """Of this stage alone."""
    samples: int

    @property
    def name(self) -> str:
        return self.begin.stage

    @property
    def end(self) -> int:
        """Iterations of the run after its last one."""
        return self.begin.iteration + self.iterations

    @property
    def tokens(self) -> int:
        return self.samples * self.config.model.seq_length


def stages(recipe: RunConfig) -> list[Stage]:
    """The stages of a recipe, in their order; none where it has no ``[[stage]]``.

    Raises SharedMistake with everything that is wrong with the tables themselves; what is wrong with a stage's
    configuration is ``RunConfig.problems``.
    """
    if not recipe.stage:
        return []
    problems = [*_recipe_problems(recipe)]
    before = replace(recipe, stage=())
    configs = [before := _changed(before, one, problems) for one in recipe.stage]
    if problems:
        raise SharedMistake("\n".join(problems))
    found = _lengths(recipe.stage, configs)
    if recipe.train.train_iters not in (TrainConfig().train_iters, found[-1].end):
        raise SharedMistake(
            f"train.train_iters = {recipe.train.train_iters}, but the last [[stage]] ends after {found[-1].end} "
            "iterations. Leave train.train_iters out: stages say how long the run is."
        )
    last, averaged = found[-1], recipe.train.average_last
    if averaged is not None and averaged > last.iterations:
        raise SharedMistake(
            f'train.average_last = {averaged}, and [[stage]] "{last.name}", the last, has {last.iterations}: '
            "weights of several stages are not averaged. Give at most as many."
        )
    return _with_curves(recipe, found)


def stage_at(found: Sequence[Stage], iteration: int) -> Stage:
    """The stage of the iteration after ``iteration``; the last one where all are over."""
    return next((one for one in found if iteration < one.end), found[-1])


def _recipe_problems(recipe: RunConfig) -> Iterator[str]:
    names = [one.name for one in recipe.stage]
    for number, one in enumerate(recipe.stage):
        if not one.name or not one.name.isprintable() or len(one.name) > 60 or names.index(one.name) < number:
            yield f"stage[{number}].name: expected 1 to 60 characters, each stage another name, found {one.name!r}."
        given = [name for name in ("iterations", "samples", "tokens") if getattr(one, f"until_{name}") is not None]
        if len(given) != 1:
            shown = " and ".join(f"until_{name}" for name in given) or "none"
            yield f'stage "{one.name}": expected one of until_iterations, until_samples, until_tokens, found {shown}.'
    if recipe.train.decay_from is not None:
        yield "train.decay_from branches off a run without stages; a stage with an lr_decay_style of its own decays."
    if recipe.debug:
        yield "--debug takes another batch, and [[stage]] tables count with this one. Leave one of them out."
    if recipe.data.order == "megatron":
        yield 'data.order = "megatron" fixes the order of the whole training. Leave it, or [[stage]], out.'
    streamed = recipe.data.stream or any("stream" in one.data for one in recipe.stage)
    if streamed and any("seq_length" in one.model for one in recipe.stage):
        yield "data.stream: a stage cannot change model.seq_length of streams yet. Make shards with tools.preprocess."
    if recipe.train.step_batch_size_schedule is not None:
        yield "train.step_batch_size_schedule: stages have a global_batch_size each. Leave it, or [[stage]], out."


def _changed(before: RunConfig, stage: StageConfig, problems: list[str]) -> RunConfig:
    """What held before, with a stage's fields set; what cannot be set becomes a problem."""
    found, kinds = before, sections()
    for section, values in stage.sections.items():
        hints, own = typing.get_type_hints(kinds[section], include_extras=True), dict[str, Any]()
        for name, value in values.items():
            if problem := _refused(section, name, hints):
                problems.append(f'stage "{stage.name}": {section}.{name}: {problem}')
                continue
            read, wrong = structured(value, hints[name])
            problems += [f'stage "{stage.name}": {section}.{name}: {one.lstrip(": ")}' for one in wrong]
            own[name] = read
        if section == "data" and any(name in own for name in TEXTS):
            default = kinds["data"]()
            own = {name: getattr(default, name) for name in TEXTS} | own
        found = replace(found, **{section: replace(getattr(found, section), **own)})
    return found


def _refused(section: str, name: str, hints: dict[str, Any]) -> str:
    if name not in hints:
        return f"unknown key.{did_you_mean(f'{section}.{name}', [f'{section}.{one}' for one in hints])}"
    if section == "model" and name not in MODEL:
        return f"a stage changes no weight's shape or meaning. It may set {', '.join(sorted(MODEL)[:4])} and the like."
    if name in NEVER.get(section, ()):
        return "holds for the whole run. Give it outside of [[stage]]."
    return ""


def _lengths(given: Sequence[StageConfig], configs: Sequence[RunConfig]) -> list[Stage]:
    """Where each stage begins and ends. Raises SharedMistake for one that ends where it begins."""
    found: list[Stage] = []
    iteration = samples = tokens = data_iteration = 0
    for number, (stage, config) in enumerate(zip(given, configs, strict=True)):
        if number and _reads_otherwise(configs[number - 1], config):
            data_iteration = iteration
        config = _without_ramp(config, samples)
        batches = batch_schedule(config.train, config.model.seq_length)
        if batches.problems(1, 1):  # said with the others, by RunConfig.problems
            batches = BatchSchedule(global_batch_size=max(1, config.train.global_batch_size))
        length = _iterations(stage, batches, iteration, samples, tokens, config.model.seq_length)
        if length < 1:
            raise SharedMistake(
                f'stage "{stage.name}" ends where it begins, after {iteration:,} iterations, {samples:,} samples and '
                f"{tokens:,} tokens: until_… counts from the beginning of the run."
            )
        taken = batches.consumed_after(length, samples) - samples
        begin = Begin(
            stage=stage.name, number=number, count=len(given),
            iteration=iteration, samples=samples, tokens=tokens,
            data_iteration=data_iteration, curve_iteration=0, curve_samples=0,
            ends=(*(one.end for one in found), iteration + length),
        )  # fmt: skip
        found.append(Stage(config=config, begin=begin, iterations=length, samples=taken))
        iteration, samples, tokens = iteration + length, samples + taken, tokens + taken * config.model.seq_length
    return found


def _iterations(
    stage: StageConfig, batches: BatchSchedule, iteration: int, samples: int, tokens: int, seq_length: int
) -> int:
    """How many iterations a stage takes that begins after so many iterations, samples and tokens."""
    if stage.until_iterations is not None:
        return stage.until_iterations - iteration
    if stage.until_samples is not None:
        target = stage.until_samples
    else:
        target = samples - (tokens - (stage.until_tokens or 0)) // max(1, seq_length)  # rounded up
    low, high = 0, max(0, target - samples)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if batches.consumed_after(middle, samples) >= target else (middle + 1, high)
    return low


def _without_ramp(config: RunConfig, samples: int) -> RunConfig:
    """A ramp that is over by now is left out, so that a stage may have another full size."""
    ramp = config.train.rampup_batch_size
    if ramp is None or samples < ramp[2]:
        return config
    return replace(config, train=replace(config.train, rampup_batch_size=None))


def _reads_otherwise(before: RunConfig, config: RunConfig) -> bool:
    """Whether samples are others, or come in another order."""
    same = ("paths", "blend", "blend_file", "stream", "split", "stream_count", "on_bad_document", "max_document_mb")
    return before.model.seq_length != config.model.seq_length or any(
        getattr(before.data, name) != getattr(config.data, name) for name in same
    )


def _with_curves(recipe: RunConfig, found: Sequence[Stage]) -> list[Stage]:
    """With lengths of the whole run in each: of curves, which span the stages up to the next curve, in samples."""
    begins = [number for number, one in enumerate(recipe.stage) if number == 0 or CURVE & one.optimizer.keys()]
    result: list[Stage] = []
    for number, stop in zip(begins, [*begins[1:], len(found)], strict=True):
        spanned, first = found[number:stop], found[number].begin
        optimizer = spanned[0].config.optimizer
        if number:
            optimizer = _continued(result[-1].config, spanned[0], CURVE & recipe.stage[number].optimizer.keys())
        of_curve = _of_curve(optimizer, spanned)
        for one in spanned:
            begin = replace(one.begin, curve_iteration=first.iteration, curve_samples=first.samples)
            train = replace(one.config.train, train_iters=one.end)
            if not begin.is_last:  # the last iterations of the run are meant
                train = replace(train, average_last=None)
            own = replace(one.config.optimizer, **of_curve)
            config = replace(one.config, optimizer=own, train=train, begin=begin)
            result.append(replace(one, config=config, begin=begin))
    return result


def _of_curve(optimizer: OptimizerConfig, spanned: Sequence[Stage]) -> dict[str, Any]:
    """The fields of a curve, with lengths in samples, so that each stage's configuration makes the same one."""
    schedule = curve(optimizer, sum(one.iterations for one in spanned), _samples_of(spanned))
    lengths = {
        "lr_decay_iters": None,
        "lr_decay_samples": schedule.decay_samples,
        "lr_wsd_decay_iters": None,
        "lr_wsd_decay_samples": schedule.wsd_decay_samples,
        "weight_decay_incr_samples": schedule.weight_decay_samples,
    }
    if optimizer.lr_warmup_fraction is None:
        lengths |= {"lr_warmup_iters": 0, "lr_warmup_samples": int(schedule.warmup_samples)}
    return {name: getattr(optimizer, name) for name in CURVE} | lengths


def _continued(before: RunConfig, stage: Stage, named: Set[str]) -> OptimizerConfig:
    """What a stage's own curve is made of: the rates that held until now, without a warm-up, and the fields named."""
    rates, optimizer, asked = before.schedule.rates(stage.begin.samples), before.optimizer, stage.config.optimizer
    default = OptimizerConfig()
    fresh = {name: getattr(default, name) for name in CURVE if name.startswith(("lr_warmup", "lr_decay_iters"))}
    lr = asked.lr if "lr" in named else rates.learning_rate
    if lr == 0:
        raise SharedMistake(
            f'stage "{stage.name}": the learning rate is 0 when it begins, at the end of the curve before. Give '
            "optimizer.lr, or let that curve end later or higher (optimizer.lr_decay_style, min_lr, lr_decay_iters)."
        )
    kept = {
        **fresh,
        "lr": lr,
        "min_lr": min(optimizer.min_lr, lr),
        "lr_warmup_samples": 0,
        "lr_decay_samples": None,
        "lr_wsd_decay_iters": None,
        "lr_wsd_decay_samples": None,
        "decoupled_lr": rates.decoupled_learning_rate,
        "weight_decay": rates.weight_decay,
        "start_weight_decay": None,
        "end_weight_decay": None,
        "weight_decay_incr_style": "constant",
        "weight_decay_incr_samples": None,
    }
    if rates.decoupled_learning_rate is not None:
        least = optimizer.min_lr if optimizer.decoupled_min_lr is None else optimizer.decoupled_min_lr
        kept["decoupled_min_lr"] = min(least, asked.decoupled_lr or 0.0)
    return replace(optimizer, **(kept | {name: getattr(asked, name) for name in named}))


def _samples_of(spanned: Sequence[Stage]) -> Callable[[int], int]:
    """Samples that the first so many iterations of several stages take; the last one goes on for ever."""

    def samples(iterations: int) -> int:
        consumed, left = spanned[0].begin.samples, iterations
        for one in spanned:
            batches = batch_schedule(one.config.train, one.config.model.seq_length)
            taken = left if one is spanned[-1] else min(left, one.iterations)
            consumed, left = batches.consumed_after(taken, consumed), left - taken
        return consumed - spanned[0].begin.samples

    return samples


def fields_set(stage: StageConfig) -> list[str]:
    """What a stage changes, by dotted names."""
    return [f"{section}.{name}" for section, values in stage.sections.items() for name in values]
