"""Which tensors ``--format megatron`` writes, by Megatron's keys, and from what."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from models.resolve import resolve
from models.shapes import GPTShape
from program.errors import UserError
from tools.reshard.checkpoint_source import STATE, STATES, CheckpointSource
from tools.reshard.megatron import args as megatron_args
from tools.reshard.megatron.buckets import FlatMemory, flat_origin, memories
from tools.reshard.megatron.keys import Style, theirs
from tools.reshard.megatron.state import dtypes_of
from tools.reshard.options import ReshardOptions
from tools.reshard.plan import KEEPS_DTYPE, ReshardPlan, is_of_vocabulary, padded_rows, repadded
from tools.reshard.tensors import SourceRows, TargetTensor
from tools.shared.dtypes import TORCH_DTYPES


def plan(source: CheckpointSource, options: ReshardOptions) -> ReshardPlan:
    """Megatron's checkpoint from a source. Raises UserError for what cannot be asked of it.

    Weights are written beside the optimizer's fp32 ones, as Megatron has them, in the dtype that the model computes in.
    """
    config = repadded(source, options)
    shape = resolve(config.model, source.real_vocab_size)
    if shape.hybrid_layer_pattern or any(shape.linear_blocks):
        raise UserError(
            "this model is a hybrid (model.hybrid_layer_pattern or model.linear_attention_freq), whose layers Megatron "
            "numbers, and whose projections it cuts, otherwise: it is not written in Megatron's format. Use "
            "Triplane's, or `python -m tools.convert export` for transformers."
        )
    if problems := options.job.problems(shape.num_layers, shape.mtp_num_layers):
        raise UserError("\n".join(problems))
    if lacking := megatron_args.problems(shape):
        raise UserError(f"{source.folder}: Megatron-LM has no argument for {', '.join(lacking)}. It cannot load this.")
    if config.optimizer.lr_decay_style in ("power", "minus-square-root") and not options.drop_optimizer:
        raise UserError(
            f'{source.folder}: optimizer.lr_decay_style = "{config.optimizer.lr_decay_style}", which Megatron-LM has '
            "not: it could not go on with this schedule. --drop_optimizer writes the weights alone."
        )
    rows = padded_rows(source, config, options)
    dtype = options.dtype or TORCH_DTYPES[config.precision.dtype]
    targets: list[tuple[str, TargetTensor]] = []
    for key, origin in source.weights().items():
        kept = origin.dtype if key.endswith(KEEPS_DTYPE) else dtype
        targets.append((key, _target(key, origin, kept, rows)))
        if not options.drop_optimizer:
            targets += [(key, _target(name, state, state.dtype, rows)) for name, state in source.states(key).items()]
    state = dataclasses.replace(source.state, optimizer={}) if options.drop_optimizer else source.state
    memories: tuple[FlatMemory, ...] = ()
    flat: list[TargetTensor] = []
    if options.job.optimizer_format == "dp_reshardable" and not options.drop_optimizer:
        memories = _memories(targets, source, shape, options)
        flat = _in_buckets(memories, targets, dtypes_of(config, dtype))
        targets = [(key, target) for key, target in targets if key == target.key]
    groups = tuple((target,) for target in (*_renamed(targets, options.keys), *flat))
    return ReshardPlan(groups=groups, state=state, config=config, memories=memories)


def _memories(
    targets: Sequence[tuple[str, TargetTensor]], source: CheckpointSource, shape: GPTShape, options: ReshardOptions
) -> tuple[FlatMemory, ...]:
    """What of the optimizer lies where. Raises UserError for sizes that do not fit, and where there is no optimizer."""
    shapes = {key: target.shape for key, target in targets if key == target.key}
    with_state = {key for key, target in targets if key != target.key}
    if bare := [key for key in shapes if key not in with_state and not key.endswith(KEEPS_DTYPE)]:
        raise UserError(
            f"--optimizer_format dp_reshardable: {source.folder} has no optimizer's state of {bare[0]}. Leave it out."
        )
    return tuple(memories(options.job, shape, shapes))


def _in_buckets(
    found: Sequence[FlatMemory], targets: Sequence[tuple[str, TargetTensor]], dtypes: str
) -> list[TargetTensor]:
    """A tensor for each bucket and state."""
    origin_of = {target.key: target.origins[0] for _, target in targets}
    flat: list[TargetTensor] = []
    for memory in found:
        for (number, buffer), state in itertools.product(enumerate(memory.buffers), STATES):
            states = {key: origin_of[f"{STATE}{state}.{key}"] for key in memory.keys}
            for at, bucket in enumerate(buffer):
                origin = flat_origin(bucket, states)
                key = f"{memory.prefix}.gbuf_idx_{number}.dtype_{dtypes}.bucket_idx_{at}.{state}"
                flat.append(TargetTensor(key, origin.dtype, (bucket.unpadded,), (origin,)))
    return flat


def _target(key: str, origin: SourceRows, dtype: str, rows: int | None) -> TargetTensor:
    shape = (rows, *origin.shape[1:]) if rows is not None and is_of_vocabulary(key) else origin.shape
    return TargetTensor(key, dtype, shape, (origin,))


def _renamed(targets: Sequence[tuple[str, TargetTensor]], style: Style) -> Iterator[TargetTensor]:
    """By Megatron's keys; blocks put together where it stacks them. Raises UserError where they are not alike."""
    stacks: dict[str, dict[int, TargetTensor]] = {}
    for weight, target in targets:
        key, block = theirs(weight, style)
        name = target.key.removesuffix(weight) + key
        if block is None:
            yield dataclasses.replace(target, key=name)
        else:
            stacks.setdefault(name, {})[block] = target
    count = max((len(stack) for stack in stacks.values()), default=0)
    for name, stack in stacks.items():
        alike = {(target.dtype, target.shape) for target in stack.values()}
        if len(stack) != count or len(alike) > 1:
            raise UserError(
                f"--keys stacked: {name} is in {len(stack)} of {count} blocks; Megatron stacks blocks that are alike. "
                "Use --keys per_block for GPTModel, or --keys per_layer for HybridModel."
            )
        ((dtype, shape),) = alike
        origins = tuple(stack[block].origins[0] for block in range(count))
        yield TargetTensor(name, dtype, (count, *shape), origins, stacked=True)
