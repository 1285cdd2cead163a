"""Activations that wait on the host: what a block keeps for its backward pass is copied to pinned memory behind its
forward pass, and back before its backward pass, each beside the computation of a neighbour.

As Megatron's cpu_offloading_num_layers, which megatron-core 0.19.2 accepts for HybridModel and ignores. Weights are
never copied: what shares their memory stays, which under ZeRO-3 is freed by itself. It costs a copy each way over PCIe
or NVLink-C2C, hidden where a block computes longer than its activations travel. Not yet run on a GPU.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import ref

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

LEAST_BYTES = 1 << 20
"""Of a tensor that leaves a GPU: smaller ones take longer to launch than they save."""


def install(chunk: HybridModel, layers: int, device: torch.device) -> None:
    """For the first ``layers`` of a chunk's stack, counted as HybridModel counts them."""
    least = LEAST_BYTES if device.type == "cuda" else 0
    chunk.decoder.offload = Offload(list(chunk.decoder.layers)[:layers], list(chunk.decoder.layers), device, least)


class Offload:
    """Of one pipeline chunk."""

    def __init__(
        self, offloaded: Sequence[nn.Module], layers: Sequence[nn.Module], device: torch.device, least_bytes: int
    ) -> None:
        self.least_bytes = least_bytes
        self.streams = CopyStreams() if device.type == "cuda" else None
        self.current: _ForwardPass | None = None
        for layer in layers:
            layer.register_forward_pre_hook(self._begins if layer in offloaded else self._ends)
        for module in (module for layer in offloaded for module in layer.modules()):
            experts = getattr(module, "experts", None)
            if experts is not None:  # cut over other ranks, they are gathered later
                experts.register_forward_pre_hook(self._gathered)

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Of one microbatch; its backward pass may come after those of others."""
        self.current = this = _ForwardPass(self.streams, self.least_bytes)
        try:
            with torch.autograd.graph.saved_tensors_hooks(this.pack, _unpack):
                yield
        finally:
            this.end()
            self.current = None

    def _begins(self, layer: nn.Module, _inputs: object) -> None:
        if self.current is not None:  # else it is recomputed in a backward pass
            self.current.begin(_addresses(layer))

    def _gathered(self, module: nn.Module, _inputs: object) -> None:
        if self.current is not None and self.current.layer is not None:
            self.current.layer.weights |= _addresses(module)

    def _ends(self, _layer: nn.Module, _inputs: object) -> None:
        if self.current is not None:
            self.current.end()


def _addresses(module: nn.Module) -> set[int]:
    """Of the memory of its parameters, but for those that are shards now."""
    whole = (parameter for parameter in module.parameters() if not isinstance(parameter, DTensor))
    return {parameter.untyped_storage().data_ptr() for parameter in whole}


class CopyStreams:
    """On which copies travel, each way."""

    def __init__(self) -> None:
        self.to_host, self.to_device = torch.cuda.Stream(), torch.cuda.Stream()


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Kept:
    """One tensor on the host."""

    host: Tensor
    of: "_Layer"
    copied: torch.cuda.Event | None
    uses: int = 1
    """Nodes of the graph that want it."""
    back: Tensor | None = None
    arrived: torch.cuda.Event | None = None


@dataclass(eq=False, slots=True)
class _Layer:
    """What one layer has kept in one forward pass."""

    weights: set[int]
    """Addresses of their memory."""
    before: "_Layer | None"
    streams: CopyStreams | None
    kept: list[ref[_Kept]] = field(default_factory=list)
    """The graph owns them: a cycle would hold the host's memory until Python collects garbage."""
    seen: dict[tuple[object, ...], tuple[Tensor, _Kept]] = field(default_factory=dict)
    """Until the layer ends: the tensors themselves, so that no other takes their address meanwhile."""

    def keep(self, tensor: Tensor) -> _Kept:
        """A copy on the host, one for all that save the same tensor."""
        key = (tensor.data_ptr(), tensor.shape, tensor.dtype, tensor._version)
        if key in self.seen:
            kept = self.seen[key][1]
            kept.uses += 1
            return kept
        kept = self._copied(tensor)
        self.kept.append(ref(kept))
        self.seen[key] = tensor, kept
        return kept

    def _copied(self, tensor: Tensor) -> _Kept:
        if self.streams is None:
            return _Kept(tensor.detach().clone(), self, None)
        stream = self.streams.to_host
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)  # its memory is another's only once the copy is done
        return _Kept(host, self, stream.record_event())

    def fetch(self) -> None:
        """Begin to copy back what is not on its way. Nothing on a CPU."""
        if self.streams is None:
            return
        there = [kept for each in self.kept if (kept := each()) is not None]
        stream, waiting = self.streams.to_device, [kept for kept in there if kept.back is None and kept.uses]
        for kept in waiting:  # memory of the stream that computes: what it held before is done with there
            kept.back = torch.empty(kept.host.shape, dtype=kept.host.dtype, device="cuda")
        if waiting:
            stream.wait_stream(torch.cuda.current_stream())
        for kept in waiting:
            assert kept.back is not None and kept.copied is not None
            with torch.cuda.stream(stream):
                stream.wait_event(kept.copied)
                kept.back.copy_(kept.host, non_blocking=True)
            kept.back.record_stream(stream)
            kept.arrived = stream.record_event()


class _ForwardPass:
    """The layers of one microbatch, one after the other."""

    def __init__(self, streams: CopyStreams | None, least_bytes: int) -> None:
        self.streams, self.least_bytes = streams, least_bytes
        self.layer: _Layer | None = None
        self.last: _Layer | None = None

    def begin(self, weights: set[int]) -> None:
        """What is saved from now on is of another layer."""
        self.end()
        before = self.last if self.last is None or self.last.kept else self.last.before  # recomputed, it keeps nothing
        self.layer = self.last = _Layer(weights, before, self.streams)

    def end(self) -> None:
        """What is saved from now on stays."""
        if self.layer is not None:
            self.layer.seen.clear()
        self.layer = None

    def pack(self, tensor: Tensor) -> "Tensor | _Kept":
        """What autograd keeps in place of ``tensor``."""
        if self.layer is None or not self._leaves(tensor, self.layer):
            return tensor
        return self.layer.keep(tensor)

    def _leaves(self, tensor: Tensor, layer: _Layer) -> bool:
        """Plain activations: no subclass, whose parts only its class knows; no view with gaps."""
        return (
            type(tensor) is Tensor
            and tensor.is_contiguous()
            and tensor.nbytes >= max(1, self.least_bytes)
            and (self.streams is None or tensor.is_cuda)
            and tensor.untyped_storage().data_ptr() not in layer.weights
        )


def _unpack(kept: "Tensor | _Kept") -> Tensor:
    """As it was saved; the layer before, which comes next in a backward pass, is fetched meanwhile."""
    if isinstance(kept, Tensor):
        return kept
    if kept.of.streams is None:
        return kept.host
    kept.uses = max(1, kept.uses)  # a graph that is kept may ask once more
    kept.of.fetch()
    if kept.of.before is not None:
        kept.of.before.fetch()
    assert kept.back is not None and kept.arrived is not None
    back, stream = kept.back, torch.cuda.current_stream()
    stream.wait_event(kept.arrived)
    kept.uses -= 1
    if not kept.uses:
        kept.back = None
    return back
