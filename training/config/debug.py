"""``--debug``: what it changes in a configuration, and why. Flags of the command line win over it."""

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from models.resolve import resolve
from parallel.layout import replica_size
from program.printing import columns
from training.config.run_config import RunConfig, with_fields

ENVIRONMENT = {
    "NCCL_DEBUG": ("WARN", "NCCL says what it finds wrong"),
    "TORCH_FR_BUFFER_SIZE": ("20000", "collectives that torch's flight recorder keeps, for logs/ after a hang"),
    "TORCH_NCCL_ENABLE_TIMING": ("1", "and how long each took"),
    "TORCH_NCCL_DESYNC_DEBUG": ("1", "after a timeout: which rank did not join which collective"),
    "TORCH_SHOW_CPP_STACKTRACES": ("1", "errors of torch's with their C++ frames"),
}
"""Variables for runs on GPUs: value and meaning. What the environment has already stays."""


class DebugSetting(NamedTuple):
    """One field that ``--debug`` sets."""

    field: str
    value: Any
    why: str
    adds: bool = False
    """To what a flag says, which stays."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Debugged:
    """A configuration with ``--debug`` worked in: no field says any more that it was asked for, but all that it sets
    is there, so that the run's config.toml runs the same job again."""

    config: RunConfig
    environ: Mapping[str, str]
    """To be set before torch loads."""
    lines: list[str]
    """For people: what changed from what to what and why, and which flags won."""


def debugged(
    config: RunConfig, world_size: int, explicit: Collection[str], environ: Mapping[str, str], *, cuda: bool
) -> Debugged:
    """``config`` as ``--debug`` wants it on ``world_size`` ranks; as it is without ``--debug``.

    explicit: dotted names of the fields that flags have set, which stay. cuda: the run is on GPUs.
    """
    if not config.debug:
        return Debugged(config=config, environ={}, lines=[])
    wanted = [one for one in _settings(config, world_size, cuda) if _value(config, one.field) != one.value]
    kept = [one for one in wanted if one.field in explicit and not one.adds]
    changed = [one for one in wanted if one not in kept]
    variables = {name: value for name, (value, _) in ENVIRONMENT.items() if cuda and name not in environ}
    rows = [(one.field, f"{_shown(_value(config, one.field))} -> {_shown(one.value)}", one.why) for one in changed] + [
        (name, f"unset -> {value}", ENVIRONMENT[name][1]) for name, value in variables.items()
    ]
    lines = [f"--debug changes {len(rows)} settings:" if rows else "--debug changes nothing: all is set so already"]
    lines += columns(rows, left=(0, 1, 2))
    lines += [
        f"  your flag wins: {one.field} stays {_shown(_value(config, one.field))} (--debug: {_shown(one.value)})"
        for one in kept
    ]
    lines += [
        f"  your environment wins: {name} stays {environ[name]} (--debug: {value})"
        for name, (value, _) in ENVIRONMENT.items()
        if cuda and environ.get(name, value) != value
    ]
    config = with_fields(config, {one.field: one.value for one in changed})
    return Debugged(config=dataclasses.replace(config, debug=False), environ=variables, lines=lines)


def _settings(config: RunConfig, world_size: int, cuda: bool) -> Iterator[DebugSetting]:
    """All that ``--debug`` sets, in the order in which it is said."""
    yield from _batch(config, world_size)
    yield DebugSetting("train.deterministic_mode", True, "equal runs are equal bit by bit; unwritten memory is NaN")
    yield DebugSetting(
        "train.detect_anomaly",
        True,
        "errors of the backward pass show its forward pass in logs/; several times as slow",
    )
    yield DebugSetting("checkpoint.async_save", False, "a save that fails does so in its own iteration")
    for field in ("parallel.overlap_grad_reduce", "parallel.overlap_param_gather", "kernels.tp_comm_overlap"):
        yield DebugSetting(field, False, "collectives run by themselves, where stacks show them")
    if cuda and resolve(config.model, None).moe_shared_expert_intermediate_size:
        off = tuple(dict.fromkeys((*config.kernels.off, "moe_shared_expert_overlap")))
        yield DebugSetting("kernels.off", off, "experts compute one after the other", adds=True)
    yield DebugSetting("kernels.cuda_graph_impl", "none", "each kernel is launched, and fails, by itself")
    yield DebugSetting("train.compile", False, "blocks run as they are written, where stacks show them")
    yield DebugSetting("fault.replica_check_interval", 1, "replicas' weights are compared before every update")
    yield DebugSetting("fault.nonfinite", "stop", "the first NaN or Inf ends the run and is located")
    yield DebugSetting("log.log_interval", 1, "a line for each iteration")
    yield DebugSetting("log.ranks", "all", "a log file for each rank")


def _batch(config: RunConfig, world_size: int) -> Iterator[DebugSetting]:
    """One microbatch for each replica; of the interleaved schedule, the fewest that it can run.

    Nothing where ``world_size`` ranks make no whole replicas, which ``RunConfig.problems`` reports.
    """
    train, parallel = config.train, config.parallel
    replicas, rest = divmod(world_size, replica_size(parallel))
    if rest or not replicas:
        return
    interleaved = (parallel.virtual_pipeline_model_parallel_size or 1) > 1
    count = parallel.pipeline_model_parallel_size if interleaved else 1
    size = train.micro_batch_size * replicas * count
    what = "one microbatch" if count == 1 else f"{count} microbatches (the interleaved schedule needs PP {count})"
    for name in ("rampup_batch_size", "step_batch_size_schedule"):
        yield DebugSetting(f"train.{name}", None, "the batch stays small")
    yield DebugSetting(
        "train.global_batch_size",
        size,
        f"{what} a step on each replica: micro_batch_size {train.micro_batch_size} x DP {replicas}"
        + (f" x {count}" if count > 1 else ""),
    )


def _value(config: RunConfig, field: str) -> Any:
    section, _, name = field.partition(".")
    return getattr(getattr(config, section), name)


def _shown(value: Any) -> str:
    """A value as a recipe spells it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_shown, value))}]"
    return "unset" if value is None else f'"{value}"' if isinstance(value, str) else str(value)
