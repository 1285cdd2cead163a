"""Where the program looks at values or at its device: a closed list, patched in the traced process."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import _disable_current_modes

from models import gpt
from tools.plan.trace import balance


def install() -> None:
    """Of a process that traces and does nothing else."""
    gpt.initialise = _nothing
    dist.all_gather_object = _own  # type: ignore[assignment]
    torch.Tensor.type = _type(torch.Tensor.type)  # type: ignore[method-assign]
    functional = torch.nn.functional
    functional.scaled_dot_product_attention = _attention(functional.scaled_dot_product_attention)
    balance.install()


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """Initial weights have no size of their own, and take as long as all the rest."""


def _own(gathered: list[Any], mine: Any, group: Any = None) -> None:
    """Every rank would say what this one says."""
    for number in range(len(gathered)):
        gathered[number] = mine


def _type(original: Callable[..., Any]) -> Callable[..., Any]:
    """mcore sorts parameters by names such as "torch.cuda.FloatTensor"; here they are "torch.cuda.meta.FloatTensor"."""

    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = original(tensor, *args, **kwargs)
        return found.replace("meta.", "", 1) if isinstance(found, str) else found

    return call


def _attention(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch chooses a kernel by the device; here it is the one that it would choose on a CPU for these shapes."""

    def call(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        mask = None if attn_mask is None else _on_cpu(attn_mask)
        q, k, v = (_on_cpu(tensor) for tensor in (query, key, value))
        choice = torch._fused_sdp_choice(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if choice != SDPBackend.FLASH_ATTENTION.value:
            return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        out: torch.Tensor = flash(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
        return out

    return call


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Of the same shape, in the memory of one row."""
    with _disable_current_modes():
        return torch.empty(tensor.shape[-1], dtype=tensor.dtype).expand(tensor.shape)
