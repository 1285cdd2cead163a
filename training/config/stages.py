"""From a recipe with ``[[stage]]`` tables to one configuration for each stage.

A stage change is what a resume is: the stage before ends with a checkpoint, and the next one continues it with its own
configuration, in new processes. So whatever a resume may change a stage may, and nothing else of the run knows stages:
each configuration made here is an ordinary one, with lengths in samples and with ``begin``, where it takes over.
"""

import contextlib
import typing
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from data.config import TEXTS
from program.errors import SharedMistake, UserError
from program.schema import structured
from training.config.recipe import did_you_mean, sections
from training.config.run_config import RunConfig
from training.config.stage_config import RunPosition, StageConfig
from training.config.stage_curves import with_curves
from training.config.stage_lengths import lengths
from training.config.train_config import TrainConfig

MODEL = frozenset({
    "seq_length", "rotary_base", "rotary_base_local", "rope_scaling", "rope_scaling_factor", "rope_low_freq_factor",
    "rope_high_freq_factor", "rope_original_max_position_embeddings", "rope_attention_factor", "rope_short_factor",
    "rope_long_factor", "yarn_beta_fast", "yarn_beta_slow", "mscale", "mscale_all_dim", "hidden_dropout",
    "attention_dropout",
})  # fmt: skip
"""Of the model: what no weight's shape or meaning depends on."""
NEVER = {
    "precision": ("dtype",),
    "data": ("tokenizer", "eod_token", "builtin_vocab_size", "order", "megatron_train_samples", "split", "stream_count",
             "stream_shuffle", "samples_to_skip", "on_bad_document", "max_document_mb", "max_expansion", "jsonl_key",
             "csv_column"),
    "optimizer": ("optimizer", "lr_warmup_samples", "lr_decay_samples", "lr_wsd_decay_samples"),
    "train": ("train_iters", "iterations_to_skip", "decay_from", "decay_iters", "seed", "step_batch_size_schedule",
              "ema_decay", "average_last", "loss"),
    "checkpoint": ("load", "finetune"),
}  # fmt: skip
"""Of other sections: what holds for the whole run, or is counted from its beginning."""


def stages(recipe: RunConfig, at: RunPosition | None = None) -> list[RunConfig]:
    """The configuration of each stage of a recipe, in their order; none where it has no ``[[stage]]``.

    Each is without ``[[stage]]``, with ``begin``, and with ``train.train_iters`` at the stage's end.
    at: how far the run has come; None: not begun. Raises SharedMistake with everything that is wrong with the tables
    themselves; what is wrong with a stage's configuration is ``RunConfig.problems``.
    """
    if not recipe.stage:
        return []
    problems = [*_recipe_problems(recipe)]
    before = replace(recipe, stage=())
    configs = [before := _changed(before, one, problems) for one in recipe.stage]
    if problems:
        raise SharedMistake("\n".join(problems))
    found = lengths(recipe.stage, configs, at)
    last, averaged = found[-1], recipe.train.average_last
    if recipe.train.train_iters not in (TrainConfig().train_iters, last.train.train_iters):
        raise SharedMistake(
            f"train.train_iters = {recipe.train.train_iters}, but the last [[stage]] ends after "
            f"{last.train.train_iters} iterations. Leave train.train_iters out: stages say how long the run is."
        )
    if averaged is not None and averaged > last.iterations:
        raise SharedMistake(
            f'train.average_last = {averaged}, and [[stage]] "{recipe.stage[-1].name}", the last, has '
            f"{last.iterations}: weights of several stages are not averaged. Give at most as many."
        )
    return with_curves(recipe, found, at)


def stage_at(found: Sequence[RunConfig], iteration: int) -> RunConfig:
    """The stage of the iteration after ``iteration``; the last one where all are over."""
    return next((one for one in found if iteration < one.train.train_iters), found[-1])


@contextlib.contextmanager
def of_stage(config: RunConfig) -> Iterator[None]:
    """Around what checks the configuration of a stage: a mistake names it."""
    try:
        yield
    except UserError as error:
        if config.begin is None:
            raise
        kind = SharedMistake if isinstance(error, SharedMistake) else UserError
        raise kind(f'stage "{config.begin.first.name}": {error}') from None


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
    if recipe.checkpoint.convert and not recipe.checkpoint.finetune:
        yield "checkpoint.convert: convert that checkpoint first (tools.reshard), so that stages know where it stands."
    if recipe.debug:
        yield "--debug takes another batch, and [[stage]] tables count with this one. Leave one of them out."
    if recipe.data.order == "megatron":
        yield 'data.order = "megatron" fixes the order of the whole training. Leave it, or [[stage]], out.'
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
        return "a stage changes no weight's shape or meaning. It may set seq_length, RoPE's base, its scaling, dropout."
    if name in NEVER.get(section, ()):
        return "holds for the whole run. Give it outside of [[stage]]."
    return ""
