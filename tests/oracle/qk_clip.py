"""QK-clip in plain PyTorch (arXiv:2507.20534, Algorithm 1; megatron-core's rule for heads that share a key): the
largest logit of each head of transformers' model, and what rows are multiplied by, under our canonical names."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from models.shapes import GPTShape
from models.symbols import ATTENTIONS
from tests.oracle.exported import State
from training.config.optimizer_config import OptimizerConfig

NAME = "oracle"


class Logits:
    """The largest logits [heads] of each attention of a model, in the order in which they run."""

    def __init__(self) -> None:
        self.largest: list[Tensor] = []
        self.real = torch.zeros(0, dtype=torch.bool)
        """Of the rows that run, the places that are no padding, [b, s]."""
        self.ran = 0

    def begin(self, real: Tensor) -> None:
        """A forward pass."""
        self.real, self.ran = real, 0

    def listen(self, modules: Iterable[nn.Module]) -> None:
        """Let transformers' attention tell."""
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import eager_mask

        AttentionInterface.register(NAME, self._attend)
        AttentionMaskInterface.register(NAME, eager_mask)
        for module in modules:
            config: Any = getattr(module, "config", None)
            if config is not None:
                config._attn_implementation = NAME

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **kwargs: Any
    ) -> Any:
        """query [b, n, s, d], key [b, g, s, d]; mask: what is added to logits, [b, 1, s, s]."""
        with torch.no_grad():
            keys = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
            logits = query @ keys.mT * scaling
            logits = logits + torch.full(logits.shape[-2:], -torch.inf).triu(1)
            logits = logits if mask is None else logits + mask
            found = logits.masked_fill(~self.real[:, None, :, None], -torch.inf).amax((0, 2, 3))
        if self.ran == len(self.largest):
            self.largest.append(found)
        self.largest[self.ran] = torch.maximum(self.largest[self.ran], found)
        self.ran += 1
        eager = sys.modules[type(module).__module__].eager_attention_forward
        return eager(module, query, key, value, mask, scaling=scaling, **kwargs)


def factors(weights: State, largest: Sequence[Tensor], settings: OptimizerConfig, shape: GPTShape) -> State:
    """What each element of ``weights`` is multiplied by, under the same names."""
    found = {name: torch.ones_like(weight) for name, weight in weights.items()}
    paths = [f"layers.{number}." for number, symbols in enumerate(shape.blocks) if set(symbols) & set(ATTENTIONS)]
    paths += [f"mtp.{depth}." for depth in range(shape.mtp_num_layers)]
    assert len(paths) == len(largest)
    for path, logits in zip(paths, largest, strict=True):
        etas = (settings.qk_clip_threshold / logits).where(logits > settings.qk_clip_threshold, 1.0)
        for name in found:
            *path_of_module, module, _ = name.split(".")
            if name.startswith(path) and path_of_module[-1:] == ["self_attention"] and "norm" not in name:
                of_heads = _of_latents if shape.multi_latent_attention else _of_groups
                of_heads(module, found[name], etas, settings.qk_clip_alpha, shape)
    return found


def _of_latents(module: str, rows: Tensor, etas: Tensor, alpha: float, shape: GPTShape) -> None:
    keys, rotary = shape.qk_head_dim, shape.qk_pos_emb_head_dim
    for head, eta in enumerate(etas):
        if module in ("linear_q_proj", "linear_q_up_proj"):
            first = head * (keys + rotary)
            rows[first : first + keys] *= eta**alpha
            rows[first + keys : first + keys + rotary] *= eta
        elif module == "linear_kv_up_proj":
            first = head * (keys + shape.v_head_dim)
            rows[first : first + keys] *= eta ** (1 - alpha)


def _of_groups(module: str, rows: Tensor, etas: Tensor, alpha: float, shape: GPTShape) -> None:
    if module != "linear_qkv":
        return
    width, heads = shape.kv_channels, shape.num_attention_heads // shape.num_query_groups
    size = (heads * (1 + shape.attention_output_gate) + 2) * width
    for group in range(shape.num_query_groups):
        first, eta = group * size, etas[group * heads : (group + 1) * heads].min()
        rows[first : first + heads * width] *= eta**alpha
        rows[first + size - 2 * width : first + size - width] *= eta ** (1 - alpha)
