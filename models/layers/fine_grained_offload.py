"""Inputs of parts of a block that wait on the host for their backward pass: megatron-core's own
fine_grained_activation_offloading, by whose names its fields go, on GPUs with Transformer Engine.

The first iteration offloads everything, and learns in which order groups of tensors come back; from the second on what
is needed next is copied back beside the computation of the group behind it. Megatron's schedules end each pass, those
of an evaluation too, by a call that goes back to the start of that order. Not yet run on a GPU.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import fine_grained_activation_offload as mcore
from torch import Tensor

from program.errors import SharedMistake


def settings(modules: Sequence[str], transformer_engine: bool) -> dict[str, Any]:
    """mcore's fields. Raises SharedMistake without Transformer Engine, where the first forward pass would fail."""
    if not modules:
        return {}
    if not transformer_engine:
        raise SharedMistake(
            "train.offload_modules needs a GPU and Transformer Engine's modules, found blocks of "
            "Triplane's own. Install Transformer Engine (docs/quickstart.md), or leave it out; "
            "train.cpu_offloading_num_layers offloads without it."
        )
    from transformer_engine.pytorch.cpu_offload import NVTE_CPU_OFFLOAD_V1

    if not NVTE_CPU_OFFLOAD_V1:
        raise SharedMistake(
            "train.offload_modules needs NVTE_CPU_OFFLOAD_V1=1 in the environment, found another "
            "value when Transformer Engine was imported, with which it does not mark weights: they would be offloaded, "
            "too. Set it to 1."
        )
    return {
        "fine_grained_activation_offloading": True,
        "offload_modules": list(modules),
    }


def start() -> None:
    """Before a model's first chunk: forget another model's groups, which megatron-core keeps for the whole process."""
    mcore.ChunkOffloadHandler = OrderedCopies
    mcore.FineGrainedActivationOffloadingInterface.reset_instance()


class OrderedCopies(mcore.ChunkOffloadHandler):
    """The groups of one microbatch in one chunk, whose copies wait for each other.

    megatron-core 0.19.2 (fine_grained_activation_offload.py:972, tensor_pop) copies a tensor that nothing has fetched
    yet back on the stream that computes, which has not waited for its copy to the host: in the whole first iteration,
    and where a microbatch's backward pass begins. And a copy to the host may take pinned memory (offload, line 824)
    from which another group is still being copied back (reload, line 851, frees it before that copy has run).
    """

    def tensor_pop(self, tensor_tag: Any) -> Tensor:
        if not isinstance(tensor_tag, Tensor):
            group, stream = self.offload_groups[tensor_tag[0] - 1], torch.cuda.current_stream()
            group.wait_offload_event(stream)
            group.wait_reload_event(stream)
        found: Tensor = super().tensor_pop(tensor_tag)
        return found

    def finish_all_groups(self, name: str | None = None) -> bool:
        """Whether none of its groups is to come. megatron-core (line 920, "check if this is correct") also returns True
        while a chunk still runs, if all groups before stayed on the GPU, and takes another microbatch's chunk."""
        return self.find_next_group(name) is None

    def bulk_offload(self, name: str, forced_released_tensors: list[Tensor]) -> None:
        """Free memory that nothing else may read. megatron-core (line 1106) empties that of values, which queries, keys
        and output gates share where one product makes them all, and that of a tensor whose pieces were too small to be
        offloaded. Such memory goes once nothing refers to it."""
        group = self.find_group_with_name(self._groups_to_offload, name)
        stays = {
            tensor.untyped_storage().data_ptr()
            for tensor in (group._tensors.values() if group else ())
            if isinstance(tensor, Tensor) and not self.tensor_need_offloading_checker(tensor)
        }
        storages = [(tensor, tensor.untyped_storage()) for tensor in forced_released_tensors]
        free = [each for each, own in storages if own.nbytes() == each.nbytes and own.data_ptr() not in stays]
        super().bulk_offload(name, free)

    def on_group_commit_forward(self, name: str, forced_released_tensors: list[Tensor]) -> None:
        if self.do_offload:
            self.d2h_stream.wait_stream(self.h2d_stream)
        super().on_group_commit_forward(name, forced_released_tensors)
