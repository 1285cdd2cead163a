"""Which tensors are written, and from what."""

import dataclasses
from dataclasses import dataclass

from models.resolve import resolve
from program.errors import UserError
from tools.reshard.checkpoint_source import STATE, STATES, UNCHANGED, CheckpointSource
from tools.reshard.megatron.buckets import FlatMemory
from tools.reshard.options import ReshardOptions
from tools.reshard.tensors import SourceRows, TargetTensor
from tools.shared.dtypes import FLOATS
from training.checkpoint.chosen_weights import AVERAGES
from training.checkpoint.state import State
from training.config.run_config import RunConfig

KEEPS_DTYPE = "router.expert_bias"
"""Fp32 in every model, whatever it computes in: what the routers add up over a run."""


@dataclass(kw_only=True, frozen=True)
class ReshardPlan:
    """A checkpoint to write, but for its files."""

    groups: tuple[tuple[TargetTensor, ...], ...]
    """Tensors that are cut alike: a weight alone, or the states of its optimizer."""
    state: State
    config: RunConfig
    memories: tuple[FlatMemory, ...] = ()
    """Of Megatron's dp_reshardable form: what of the optimizer lies on which rank."""

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        return sum(target.bytes for group in self.groups for target in group)


def plan(source: CheckpointSource, options: ReshardOptions) -> ReshardPlan:
    """Our checkpoint from a source. Raises UserError for what cannot be asked of it.

    Weights that the optimizer has in fp32 are not written beside it: they are its roundings.
    """
    weights = source.weights()
    config = repadded(source, options)
    rows = padded_rows(source, config, options)
    groups: list[tuple[TargetTensor, ...]] = []
    for key, origin in weights.items():
        states = {} if options.drop_optimizer else source.states(key, (*STATES, *AVERAGES))
        if states:
            groups.append(tuple(_target(name, state, state.dtype, rows) for name, state in states.items()))
        else:
            groups.append((_target(key, origin, weight_dtype(key, origin, options), rows),))
    if options.dtype is not None and any(group[0].key.startswith(STATE) for group in groups):
        raise UserError(
            f"--dtype {options.dtype}: the weights of {source.folder} are the optimizer's fp32 ones, which training "
            "goes on with; the model's are their roundings. Add --drop_optimizer for weights alone."
        )
    groups += [
        (_target(key, origin, origin.dtype, None),)
        for key, origin in source.origins.items()
        if key.startswith(UNCHANGED)
    ]
    state = dataclasses.replace(source.state, optimizer={}) if options.drop_optimizer else source.state
    return ReshardPlan(groups=tuple(groups), state=state, config=config)


def padded_rows(source: CheckpointSource, config: RunConfig, options: ReshardOptions) -> int | None:
    """Rows of the vocabulary's tensors; None where they are the source's. Raises UserError for real rows not there."""
    if not options.repads and source.pads_as_configured:
        return None
    rows = resolve(config.model, source.real_vocab_size).padded_vocab_size
    for key, origin in source.weights().items():
        if is_of_vocabulary(key) and origin.shape[0] < source.real_vocab_size:
            raise UserError(
                f"{source.folder}: {key} has {origin.shape[0]} rows, but the model {source.real_vocab_size} token ids. "
                "Mend model.vocab_size."
            )
    return rows


def weight_dtype(key: str, origin: SourceRows, options: ReshardOptions) -> str:
    """Of a weight that is written as such."""
    if options.dtype is None or key.endswith(KEEPS_DTYPE) or origin.dtype not in FLOATS:
        return origin.dtype
    return options.dtype


def _target(key: str, origin: SourceRows, dtype: str, rows: int | None) -> TargetTensor:
    shape = origin.shape
    if rows is not None and is_of_vocabulary(key):
        shape = (rows, *shape[1:])
    return TargetTensor(key, dtype, shape, (origin,))


# ---- how many rows the vocabulary gets


OF_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Keys whose first dim is the padded vocabulary; so are the states of their optimizer."""


def is_of_vocabulary(key: str) -> bool:
    """Whether a tensor has a row per token id."""
    states = (f"{STATE}{part}.{name}" for part in (*STATES, *AVERAGES) for name in OF_VOCABULARY)
    return key in OF_VOCABULARY or key in states


def repadded(source: CheckpointSource, options: ReshardOptions) -> RunConfig:
    """The configuration with the vocabulary that is asked for. Raises UserError where real rows would be lost."""
    if not options.repads:
        return source.config
    real = source.real_vocab_size
    wanted = real if options.vocab_size is None else options.vocab_size
    if wanted < real:
        raise UserError(
            f"--vocab_size {wanted}: {source.folder} has {real} token ids, and their rows are not removed. "
            f"Use {real} or more; to change the padding alone, --make_vocab_size_divisible_by."
        )
    multiple = options.make_vocab_size_divisible_by or resolve(source.config.model, None).make_vocab_size_divisible_by
    if multiple < 1:
        raise UserError(f"--make_vocab_size_divisible_by {multiple}: expected 1 or more.")
    model = dataclasses.replace(source.config.model, vocab_size=wanted, make_vocab_size_divisible_by=multiple)
    return dataclasses.replace(source.config, model=model)
