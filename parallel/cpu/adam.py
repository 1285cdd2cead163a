"""A stand-in for Transformer Engine's and Apex's FusedAdam where neither is installed.

It keeps their state layout (``exp_avg`` and ``exp_avg_sq`` per parameter, an integer ``step`` in the group), so that
mcore's DistributedOptimizer takes the very code path, and keeps the very state, that it has with Transformer Engine.
With torch's own AdamW, a resumed distributed optimizer fails (distrib_optimizer.py:839 and :1223 of 0.19.2).
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    """Adam (arXiv:1412.6980), or AdamW (arXiv:1711.05101) with ``adam_w_mode``, by torch's fused kernels."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        **_: object,
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. Parameters and gradients: fp32, any shape."""
        kernel = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [param for param in group["params"] if param.grad is not None]
            if not params:
                continue
            states = [self._state_of(param) for param in params]
            step = torch.full((), float(group["step"]), device=params[0].device)  # a copy would wait for the device
            kernel(
                params,
                [param.grad for param in params],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [step] * len(params),
                lr=float(group["lr"]),
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=float(group["weight_decay"]),
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )

    def _state_of(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        state = self.state[param]
        if "exp_avg" not in state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        return state


def install() -> None:
    """Let mcore's optimizers use it, in this process. Nothing happens where TE or Apex brings a FusedAdam."""
    import megatron.core.optimizer as mcore_optimizer
    import megatron.core.optimizer.distrib_optimizer as mcore_distributed

    if not mcore_optimizer.USING_PYTORCH_OPTIMIZER:
        return
    mcore_optimizer.Adam = mcore_distributed.Adam = FusedAdam
    mcore_optimizer.USING_PYTORCH_OPTIMIZER = False
    mcore_distributed.HAVE_APEX_OR_TE = True
