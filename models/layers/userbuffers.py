"""Transformer Engine's userbuffers: communication buffers in which its products overlap with the collectives of TP."""

import contextlib
import os
from collections.abc import Iterator

from parallel.config import PrecisionConfig
from parallel.groups import Ranks
from parallel.precision import params_dtype
from program.errors import SharedMistake


@contextlib.contextmanager
def userbuffers(ranks: Ranks, precision: PrecisionConfig, tokens: int, hidden_size: int) -> Iterator[None]:
    """Buffers of [tokens, hidden_size] for each product of a layer, for as long as the context lasts.

    tokens: of a microbatch on a rank of CP. All ranks enter together, before the model is built. Raises SharedMistake
    where the cards cannot.
    """
    from transformer_engine.pytorch.module import base

    _check(ranks, base.tex.device_supports_multicast())
    modes = base.UserBufferQuantizationMode
    needed = [modes.NONE] if precision.fp8 is None else [modes.FP8]
    if precision.fp8 and (precision.first_last_layers_bf16 or precision.fp8_shadow):
        needed.append(modes.NONE)
    base.initialize_ub(
        shape=[tokens, hidden_size], tp_size=ranks.layout.tp, quantization_modes=needed, dtype=params_dtype(precision),
        ub_cfgs={}, bootstrap_backend="nccl",
    )  # fmt: skip
    try:
        yield
    finally:
        base.destroy_ub()


def _check(ranks: Ranks, multicast: bool) -> None:
    if ranks.identity.local_world_size % ranks.layout.tp:
        raise SharedMistake(
            f"kernels.tp_comm_overlap cannot run: TP {ranks.layout.tp} does not divide the "
            f"{ranks.identity.local_world_size} ranks of a node, and userbuffers are memory of one node. Leave it out."
        )
    if not multicast and os.environ.get("UB_SKIPMC", "0") == "0":
        raise SharedMistake(
            "kernels.tp_comm_overlap cannot run: card or driver has no multicast. Set UB_SKIPMC=1 to use CUDA IPC, or "
            "leave it out."
        )
