"""The optimizer's fp32 weights and moments as boxes, and its few numbers as JSON.

Keys are ``optimizer.state.{param,exp_avg,exp_avg_sq}.<model key>`` with the model tensor's global shape, or with
``momentum_buffer`` of Muon's matrices, or the names of the user's own optimizer's state (training/optimizer_class.py),
whether the state is cut over data ranks (ZeRO-1) or not; so one form restores into the other. megatron-core's
own ``fully_reshardable`` form has the same keys, but gathers the state, and gets it wrong where a bucket is
padded. The fp32 weights (``param``) stand for the model's own, which are their roundings.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from models.layers.fp8_weights import forget_amax, kept_in_fp8
from parallel.ddp import Chunks
from parallel.groups import Ranks
from parallel.regions import Box, HeldTensor
from training.checkpoint.model_state import enumerated, is_writer
from training.checkpoint.state import JSON
from training.optimizer_forms import MOMENTS, StateForm, form_of

PREFIX = "optimizer.state."
MASTER = PREFIX + "param."
AVERAGED = "averaged"
"""Among the optimizer's numbers: of how many updates' weights each average is."""


class Slice(NamedTuple):
    """What this rank holds of a parameter's optimizer state: floats [n], of elements [start, start + n) of what it
    holds of the parameter."""

    start: int
    tensors: Mapping[str, Tensor]
    """What the optimizer keeps, or copies in fp32 where it is kept in a form that no tensor of floats is."""
    is_shared: bool
    """It is of all that: every rank that holds the parameter, or the same shard, has the same (no ZeRO-1)."""
    main: Tensor
    """The inner optimizer's parameter."""
    form: StateForm

    def on_the_host(self) -> "Slice":
        """With the copies in the host's memory: a device has room for those of one parameter, not of all."""
        copied = self.form.copied(self.main)
        tensors = {name: one.cpu() if name in copied else one for name, one in self.tensors.items()}
        return self._replace(tensors=tensors)

    def store(self) -> None:
        """Let the optimizer keep what has been written into ``tensors``."""
        self.form.store(self.main, self.tensors)


class MainParam(NamedTuple):
    """The fp32 weights that this rank updates for a parameter: a shard, a copy, or the parameter itself."""

    tensor: Tensor
    """Of an optimizer that keeps fp32 weights otherwise: the model's shard."""
    is_shared: bool
    start: int = 0
    """All as of ``Slice``."""

    @property
    def gradient(self) -> Tensor | None:
        """The reduced one, once ``prepare_gradients`` has run."""
        apart: Tensor | None = getattr(self.tensor, "decoupled_grad", None)
        return self.tensor.grad if apart is None else apart


def parts(optimizer: MegatronOptimizer) -> list[Any]:
    """The optimizers that do the work: mcore chains one for dense parameters and one for experts, say."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in chained if not getattr(part, "is_stub_optimizer", False)]


def optimizer_boxes(chunks: Chunks, optimizer: MegatronOptimizer, ranks: Ranks) -> list[Box]:
    """All of this rank's optimizer state: views of the live tensors, no communication."""
    return boxes_of_slices(chunks, slices_on_the_host(optimizer), ranks)


def slices_on_the_host(optimizer: MegatronOptimizer) -> dict[Tensor, Slice]:
    """By model parameter; to be read, or to be written and stored."""
    allocate(optimizer)
    return {param: piece.on_the_host() for param, piece in held_slices(optimizer)}


def boxes_of_slices(chunks: Chunks, slices: Mapping[Tensor, Slice], ranks: Ranks) -> list[Box]:
    """Padding between parameters and at the end of a bucket belongs to no parameter, so it never gets here."""
    found: list[Box] = []
    for number, one in enumerated(chunks):
        if one.tensor not in slices:
            continue
        piece = slices[one.tensor]
        writes = owns(number, one, piece, ranks)
        for name, tensor in piece.tensors.items():
            start = one.start + piece.start
            found += [box for at in one.regions for box in at.boxes(f"{PREFIX}{name}.", tensor, start, writes)]
    return found


def names_and_shapes(chunks: Chunks, optimizer: MegatronOptimizer | None) -> dict[str, tuple[int, ...]]:
    """Every tensor of this rank's stage that a checkpoint must have, whichever of its elements the rank holds.

    optimizer: with those of its state.
    """
    found: dict[str, tuple[int, ...]] = {}
    for _, one in enumerated(chunks):
        states: Sequence[str] = ()
        if optimizer and one.tensor.requires_grad:
            states = ("param", *_names(optimizer, one.tensor), *averages(optimizer))
        prefixes = ["", *(f"{PREFIX}{name}." for name in states)]
        found |= {prefix + at.key: at.global_shape for at in one.regions for prefix in prefixes}
    return found


def _names(optimizer: MegatronOptimizer, param: Tensor) -> Sequence[str]:
    """Of what is kept of a model's parameter; AdamW's where an optimizer says nothing else."""
    part = getattr(optimizer, "chained_optimizers", [optimizer])[0]
    names: Sequence[str] = part.state_names(param) if hasattr(part, "state_names") else MOMENTS
    return names


def averages(optimizer: MegatronOptimizer) -> Sequence[str]:
    """Names of averages of the weights (training/averages.py), which lie beside each parameter's state."""
    return tuple(optimizer.averages.names) if hasattr(optimizer, "averages") else ()


def has_known_state(optimizer: MegatronOptimizer) -> bool:
    """Whether it is AdamW, alone or beside Muon, whose state is known, and not a user's own."""
    part = getattr(optimizer, "chained_optimizers", [optimizer])[0]
    return not getattr(part, "is_own", False)


def allocate(optimizer: MegatronOptimizer) -> None:
    """Give every parameter its moments, zeros, where no update has made them yet."""
    for part in parts(optimizer):
        form_of(part).allocate()


def held_slices(optimizer: MegatronOptimizer) -> Iterator[tuple[Tensor, Slice]]:
    """(model parameter, what this rank holds of its state), for each of which it holds any."""
    for part in parts(optimizer):
        yield from _sharded(part) if isinstance(part, DistributedOptimizer) else _whole(part)


def _tensors(part: Any, form: StateForm, main: Tensor, param: Tensor) -> dict[str, Tensor]:
    return _named(form.tensors(main), _names(part, param)) | getattr(part, "averages", {}).get(main, {})


def main_params(optimizer: MegatronOptimizer) -> Iterator[tuple[Tensor, MainParam]]:
    """(model parameter, what this rank updates for it), for each of which it updates any."""
    for part in parts(optimizer):
        if isinstance(part, DistributedOptimizer):
            for param, held in _ranges(part):
                yield param, MainParam(_inner(part, param), False, held.start)
        else:
            copies = _copies(part)
            mains = (main for group in part.optimizer.param_groups for main in group["params"])
            yield from ((copies.get(main, main), MainParam(main, True)) for main in mains)


def owns(number: int, one: HeldTensor, held: Slice | MainParam, ranks: Ranks) -> bool:
    """Whether, of all ranks that hold the same of the ``number``-th parameter's state, this one saves and counts it."""
    return is_writer(number, one, ranks) if held.is_shared else one.regions[0].is_original


def _sharded(part: DistributedOptimizer) -> Iterator[tuple[Tensor, Slice]]:
    form = form_of(part)
    for param, held in _ranges(part):
        main = _inner(part, param)
        tensors = _tensors(part, form, main, param)
        yield param, Slice(held.start, tensors, is_shared=False, main=main, form=form)


def _inner(part: DistributedOptimizer, param: Tensor) -> Tensor:
    """Of the inner optimizer's parameters, this model parameter's."""
    group, order = part.model_param_group_index_map[param]
    inner: Tensor = part.optimizer.param_groups[group]["params"][order]
    return inner


def _ranges(part: DistributedOptimizer) -> Iterator[tuple[Any, Any]]:
    """(model parameter, mcore's Range of the elements that this rank updates)."""
    for buffer in part.gbuf_ranges:
        for bucket in (bucket for buckets in buffer.values() for bucket in buckets):
            for param, ranges in bucket["param_map"].items():
                yield param, ranges["param"]


def _whole(part: Any) -> Iterator[tuple[Tensor, Slice]]:
    """Without ZeRO-1: the fp32 weights are the model's own or, for fp16 and bf16, copies."""
    form, copies = form_of(part), _copies(part)
    for group in part.optimizer.param_groups:
        for main in group["params"]:
            param = copies.get(main, main)
            yield param, Slice(0, _tensors(part, form, main, param), is_shared=True, main=main, form=form)


def _copies(part: Any) -> dict[Tensor, Tensor]:
    """fp32 weights -> the model's in 16 bits, of an optimizer without ZeRO-1."""
    return {param.main_param: param for group in getattr(part, "float16_groups", []) for param in group}


def _named(state: Mapping[str, Tensor], moments: Sequence[str]) -> dict[str, Tensor]:
    return {name: state[name] for name in ("param", *moments)}


def numbers(optimizer: MegatronOptimizer, ranks: Ranks) -> dict[str, JSON]:
    """What the optimizer knows besides tensors: how many steps it took, and the state of fp16's loss scale.

    A rank that holds no element of a parameter group does not count its steps, so the largest count is taken.
    """
    groups = [group for part in parts(optimizer) for group in part.optimizer.param_groups]
    counts = []
    for counter in _counters(optimizer):  # torch's own optimizers count in each parameter's state
        counts += [group.get("step", 0) for group in counter.param_groups]
        counts += [state["step"] for state in counter.state.values() if "step" in state][:1]
    step = torch.tensor([max(map(int, counts), default=0)], device=ranks.device)
    dist.all_reduce(step, op=dist.ReduceOp.MAX)
    readable = [_readable(group) for group in groups]
    found: dict[str, JSON] = {"step": int(step), "param_groups": readable, "grad_scaler": _grad_scaler(optimizer)}
    return found | ({AVERAGED: optimizer.averages.numbers()} if averages(optimizer) else {})


def _readable(group: Mapping[str, Any]) -> dict[str, JSON]:
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in group.items()
        if isinstance(value, bool | int | float | str | tuple)
    }


def _grad_scaler(optimizer: MegatronOptimizer) -> JSON:
    for part in parts(optimizer):
        if scaler := getattr(part, "grad_scaler", None):
            state = scaler.state_dict().items()
            return {key: value.item() if isinstance(value, Tensor) else value for key, value in state}
    return None


def set_numbers(optimizer: MegatronOptimizer, saved: Mapping[str, Any]) -> None:
    """Inverse of ``numbers``, but learning rate, weight decay and betas stay the configuration's."""
    if averages(optimizer):
        optimizer.averages.restore(saved.get(AVERAGED) or {})
    for counter in _counters(optimizer):
        for group in counter.param_groups:
            group["step"] = saved["step"]
        for state in (state for state in counter.state.values() if "step" in state):
            if isinstance(state["step"], Tensor):
                state["step"].fill_(saved["step"])
            else:
                state["step"] = type(state["step"])(saved["step"])
    for part in parts(optimizer):
        scaler = getattr(part, "grad_scaler", None)
        if scaler and saved.get("grad_scaler"):
            scale = torch.tensor([saved["grad_scaler"]["scale"]], dtype=torch.float32)
            scaler.load_state_dict({**saved["grad_scaler"], "scale": scale})


def _counters(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    return [counter for part in parts(optimizer) for counter in form_of(part).counters()]


def weights_from_optimizer(chunks: Chunks, optimizer: MegatronOptimizer) -> None:
    """Make the model's weights those of the optimizer, rounded to the model's dtype or to fp8, on every data rank."""
    for param in (param for chunk in chunks for param in chunk.parameters() if kept_in_fp8(param)):
        forget_amax(param)
    for part in parts(optimizer):
        form_of(part).weights_out()
    for chunk in chunks:
        if chunk.ddp_config.use_distributed_optimizer:
            chunk.start_param_sync(force_sync=True)


def optimizer_from_weights(optimizer: MegatronOptimizer) -> None:
    """Start the optimizer's fp32 weights from the model's; from the 16 bits that those in fp8 were quantized from,
    which megatron-core takes from fp8."""
    for part in parts(optimizer):
        form_of(part).weights_in()
    for part in (part for part in parts(optimizer) if isinstance(part, DistributedOptimizer)):
        for param, held in _ranges(part):
            if hasattr(param, "_high_precision_init_val"):
                param.main_param.copy_(param._high_precision_init_val.view(-1)[held.start : held.end])
                param.clear_high_precision_init_val()
