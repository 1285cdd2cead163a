"""Names that a finding carries: of parameters and the modules that hold them, and of another rank's node."""

import os
from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from models.names import shown_name
from parallel.ddp import Chunk, Chunks, held
from parallel.fsdp import FullyShardedChunk
from parallel.groups import Ranks
from parallel.launch import node_name
from parallel.regions import Region
from training.checkpoint.agreement import from_rank


def name_of(region: Region) -> str:
    """The canonical name; of one of several experts that are one tensor, with its number."""
    name = shown_name(region.key)
    several = ".experts." in name and len(region.shape) > 2 and region.global_shape[0] > region.shape[0] == 1
    return f"{name}[{region.offset[0]}]" if several else name


def parameter_names(chunks: Chunks) -> dict[Tensor, str]:
    """Every parameter of this rank's chunks: what it holds of it. Not cheap: mcore describes the whole model for it."""
    return {one.tensor: name_of(one.regions[0]) for chunk in chunks for one in held(chunk) if one.tensor.requires_grad}


def module_parameter_names(chunk: Chunk) -> dict[Tensor, str]:
    """The same names, of one chunk, by the parameters that its modules have between steps."""
    if isinstance(chunk, FullyShardedChunk):
        return {chunk.sharded[path]: name_of(one.regions[0]) for path, one in chunk.shards.items()}
    return parameter_names([chunk])


def gradient_leaves(chunk: Chunk) -> Iterator[tuple[str, Tensor]]:
    """Names, and what autograd gives this rank's own gradients to. Collective where weights are sharded."""
    names = module_parameter_names(chunk)
    if isinstance(chunk, FullyShardedChunk):
        yield from ((names[chunk.sharded[path]], param) for path, param in chunk.whole_parameters())
    else:
        yield from ((name, param) for param, name in names.items())


def module_names(chunk: nn.Module, parameters: dict[Tensor, str]) -> dict[str, nn.Module]:
    """The leaves of an unwrapped chunk by name, in the order in which it holds them.

    A leaf with parameters is called after the first of them; another one after mcore's path, with its layer's
    canonical number, which a parameter of the same layer knows.
    """
    layers = {
        ".".join(path.split(".")[:3]): ".".join(parameters[param].split(".")[:2])
        for path, param in chunk.named_parameters()
        if param in parameters
    }
    found = dict[str, nn.Module]()
    for path, module in chunk.named_modules():
        if next(module.children(), None) is None:
            found[_module_name(path, module, parameters, layers)] = module
    return found


def _module_name(path: str, module: nn.Module, parameters: dict[Tensor, str], layers: dict[str, str]) -> str:
    named = [parameters[param] for param in module.parameters(recurse=False) if param in parameters]
    if named:
        return named[0].rpartition(".")[0] + (named[0].partition("[")[1] + named[0].partition("[")[2])
    *layer, rest = path.split(".", 3)
    return f"{layers[key]}.{rest}" if (key := ".".join(layer)) in layers else path


def non_finite(tensors: Sequence[tuple[str, Tensor]]) -> list[str]:
    """The names of those that hold a NaN or Inf. Waits for the device."""
    return [name for name, tensor in tensors if not bool(tensor.isfinite().all())]


def host_of(rank: int, ranks: Ranks) -> str:
    """The node of ``rank``, see ``launch.node_name``, on every rank. Collective."""
    return from_rank(node_name(os.environ), rank, ranks)
