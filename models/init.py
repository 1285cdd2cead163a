"""Initial weights as a pure function of (seed, canonical name, global element index).

Element i of parameter k is a normal number drawn from a hash of (seed, k, i), so every layout gets the same model, and
each rank computes its own shard only: the cost is O(local elements), nothing is communicated.
"""

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from torch import Tensor, nn

from models.costs.parameters import MAMBA_TAPS
from models.names import canonical
from models.shapes import GPTShape
from models.sublayers import num_sublayers
from parallel.regions import HeldTensor, boxes_of

BLOCK = 1 << 20  # elements per pass: bounds the memory of int64 and fp32 temporaries to about 40 MB

# SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014), as signed 64-bit.
GAMMA, MIX_1, MIX_2 = (value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


@torch.no_grad()
def initialise(held: Iterable[HeldTensor], shape: GPTShape, seed: int) -> None:
    """Fill what a rank holds of parameters and buffers, whole or shards, in place, in its own dtype."""
    for box in boxes_of(held):  # an expert is a row of one global tensor of all experts
        name = canonical(box.key)
        std = std_of(name, shape)
        if (even := uniform_of(name)) is not None:
            fill_uniform(box.data, seed, name, box.global_shape, box.offset, even)
        elif std is None:
            box.data.fill_(constant_of(name, shape))
        else:
            fill_normal(box.data, seed, name, box.global_shape, box.offset, std)


@contextlib.contextmanager
def parameters_without_memory() -> Iterator[None]:
    """Within, modules keep their parameters on "meta", with their marks, and all else, such as rotary frequencies, as
    they make it.

    A parameter has memory until its module has it, so at most one does. torch.device("meta") would take buffers and
    plain tensors as well, and mcore, which names a device for each, would not heed it. Nor does mcore give the last
    stage's copy of the embedding the first stage's values, which have no memory yet: ``initialise`` fills both alike.
    """
    register, shares_embedding = nn.Module.register_parameter, LanguageModule._is_in_embd_group

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            marks = vars(param)
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
            vars(param).update(marks)
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[assignment,method-assign]
    LanguageModule._is_in_embd_group = lambda _: False
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
        LanguageModule._is_in_embd_group = shares_embedding


XIELU = {"alpha_p": math.log(math.expm1(0.8)), "alpha_n": math.log(math.expm1(0.8 - 0.5))}
"""Softplus of these, the second with 0.5 added, is 0.8 (arXiv:2411.13010, section 4.1)."""


def constant_of(name: str, shape: GPTShape) -> float:
    """What a parameter without a standard deviation starts from."""
    if (last := name.rpartition(".")[2]) in XIELU:
        return XIELU[last]
    if name.endswith((".mixer.norm.weight", ".out_norm.weight")):  # of mixers' outputs: as the kernels have them
        return 1.0
    if name.endswith(("norm.weight", "norm_weight")):
        return 0.0 if shape.layernorm_zero_centered_gamma else 1.0
    return 1.0 if name.endswith((".mixer.D", ".self_attention.dt_bias")) else 0.0


def std_of(name: str, shape: GPTShape) -> float | None:
    """Standard deviation of a parameter's initial values; None: ``constant_of`` says, or ``uniform_of``.

    Projections that write into the residual stream get init_method_std / sqrt(their number), as in GPT-2 and Megatron:
    2 num_layers, or the letters of a pattern. muP divides all but those of embeddings and output layer by the root of
    the width.
    """
    if not name.endswith((".weight", ".gate_weight", ".softmax_offset")) or "norm" in name.rsplit(".", 2)[-2]:
        return None
    if name.endswith(("embeddings.weight", "output_layer.weight")):
        return shape.init_method_std
    std = shape.init_method_std / math.sqrt(shape.width_mult)
    if name.endswith(("linear_proj.weight", "linear_fc2.weight", ".out_proj.weight")):
        return std / math.sqrt(num_sublayers(shape))
    return std


def fill_normal(
    local: Tensor, seed: int, name: str, global_shape: tuple[int, ...], offset: tuple[int, ...], std: float
) -> None:
    """Fill ``local``, the box at ``offset`` of a tensor of ``global_shape``, with N(0, std^2), in any dtype."""
    for part, index in _indexed(local, global_shape, offset):
        part.copy_(normal(seed, name, index) * std)


class Uniform(NamedTuple):
    """Numbers drawn evenly, and what is made of them."""

    least: float
    most: float
    made: Callable[[Tensor], Tensor] = torch.clone


def uniform_of(name: str) -> Uniform | None:
    """How a parameter begins that is not normal: those of Mamba-2's mixers and gated delta nets, with decays of 1 to
    16, and of the first with steps of 0.001 to 0.1, as in megatron-core 0.19.2 (ssm/)."""
    if ".conv1d." in name:
        bound = 1 / math.sqrt(MAMBA_TAPS)
        return Uniform(-bound, bound)
    if name.endswith(".A_log"):
        return Uniform(1.0, 16.0, torch.log)
    return Uniform(math.log(1e-3), math.log(1e-1), _step_bias) if name.endswith(".mixer.dt_bias") else None


def _step_bias(logarithms: Tensor) -> Tensor:
    """What softplus makes these steps of: https://github.com/pytorch/pytorch/issues/72759."""
    steps = logarithms.exp()
    return steps + torch.log(-torch.expm1(-steps))


def fill_uniform(
    local: Tensor, seed: int, name: str, global_shape: tuple[int, ...], offset: tuple[int, ...], even: Uniform
) -> None:
    """As ``fill_normal``, with numbers of another kind."""
    for part, index in _indexed(local, global_shape, offset):
        share = (_bits(seed, name, index) & 0xFFFFFFFF).float() / 2**32
        part.copy_(even.made(even.least + (even.most - even.least) * share))


def _indexed(local: Tensor, global_shape: tuple[int, ...], offset: tuple[int, ...]) -> Iterator[tuple[Tensor, Tensor]]:
    """The box at ``offset`` some rows at a time, with the global index of each element."""
    strides = [math.prod(global_shape[dim + 1 :]) for dim in range(len(global_shape))]
    base = sum(start * stride for start, stride in zip(offset, strides, strict=True))
    rows = max(1, BLOCK // max(1, math.prod(local.shape[1:])))
    for first in range(0, local.shape[0], rows):
        part = local[first : first + rows]
        index = torch.full((), base + first * strides[0], dtype=torch.int64, device=local.device)
        for dim, (size, stride) in enumerate(zip(part.shape, strides, strict=True)):
            steps = torch.arange(size, dtype=torch.int64, device=local.device) * stride
            index = index + steps.view([size if axis == dim else 1 for axis in range(part.dim())])
        yield part, index


def normal(seed: int, name: str, index: Tensor) -> Tensor:
    """Standard normal numbers, fp32, one for each element of ``index`` (int64), by Box and Muller's transform.

    The largest possible magnitude is sqrt(-2 ln 2^-33) = 6.8.
    """
    bits = _bits(seed, name, index)
    radius, angle = ((bits >> 32) & 0xFFFFFFFF).float(), (bits & 0xFFFFFFFF).float()
    return torch.sqrt(-2.0 * torch.log((radius + 0.5) / 2**32)) * torch.cos(angle * (2 * math.pi / 2**32))


def _bits(seed: int, name: str, index: Tensor) -> Tensor:
    """64 random ones for each element."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return _mix(index * GAMMA + int.from_bytes(digest, "little", signed=True))


def _mix(bits: Tensor) -> Tensor:
    """SplitMix64's finaliser. int64 products wrap; ``>>`` keeps the sign, so its copies of it are masked away."""
    bits = (bits ^ ((bits >> 30) & ((1 << 34) - 1))) * MIX_1
    bits = (bits ^ ((bits >> 27) & ((1 << 37) - 1))) * MIX_2
    return bits ^ ((bits >> 31) & ((1 << 33) - 1))
