"""Transformer Engine's Triton kernels of cross entropy in plain torch: in Triton's interpreter they took most of a
training's time. What allocates, launches and gathers is its own. checks/triton_kernels.py compares the two.

Logits are [rows, columns] of one TP rank, in memory that has no gaps; what is reduced to one loss, and label smoothing,
the program asks for nowhere.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class PlainKernel:
    """``kernel[grid](...)``, as Triton's are launched."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._launch

    def _launch(self, **given: Any) -> None:
        asked = [
            name for name in ("label_smoothing", "COUNT_NON_IGNORE", "COMPUTE_X_SUM", "reduce_loss") if given.get(name)
        ]
        if asked:
            raise NotImplementedError(f"cross entropy with {asked[0]} is not emulated (tests/gpu_path/te)")
        with torch.no_grad():
            self.function(**given)


def cross_entropy_forward_kernel(
    *, X_ptr: Tensor, saved_input_ptr: Tensor, Y_ptr: Tensor, loss_ptr: Tensor, stats_ptr: Tensor, n_cols: int,
    ignore_idx: int, COPY_INPUT: bool, **_: Any,
) -> None:  # fmt: skip
    logits, labels = X_ptr.reshape(-1, n_cols), Y_ptr.view(-1)
    if COPY_INPUT:
        saved_input_ptr.copy_(X_ptr)
    largest, total = _statistics(logits)
    _keep(stats_ptr, largest, total)
    loss_ptr.copy_(_losses(_at_label(logits, labels), largest, total, labels, ignore_idx))


def cross_entropy_tp_pre_kernel(
    *, X_ptr: Tensor, saved_input_ptr: Tensor, Y_ptr: Tensor, local_data_ptr: Tensor, rank: int, n_cols: int,
    COPY_INPUT: bool, **_: Any,
) -> None:  # fmt: skip
    logits = X_ptr.reshape(-1, n_cols)
    if COPY_INPUT:
        saved_input_ptr.copy_(X_ptr)
    local_data_ptr[:, :3] = torch.stack([*_statistics(logits), _at_label(logits, Y_ptr.view(-1) - rank * n_cols)], 1)


def cross_entropy_tp_post_kernel(
    *, gathered_data_ptr: Tensor, Y_ptr: Tensor, loss_ptr: Tensor, stats_ptr: Tensor, world_size: int, n_rows: int,
    ignore_idx: int, **_: Any,
) -> None:  # fmt: skip
    largest, total, at_label = gathered_data_ptr.view(world_size, n_rows, 4)[..., :3].unbind(-1)
    of_all = largest.amax(0)
    total = (total * (largest - of_all).exp()).sum(0)
    _keep(stats_ptr, of_all, total)
    loss_ptr.copy_(_losses(at_label.amax(0), of_all, total, Y_ptr.view(-1), ignore_idx))


def cross_entropy_backward_kernel(
    *, saved_input_ptr: Tensor, Y_ptr: Tensor, stats_ptr: Tensor, grad_output_ptr: Tensor, rank: int, n_cols: int,
    ignore_idx: int, **_: Any,
) -> None:  # fmt: skip
    """Writes the gradient over the logits."""
    saved, labels = saved_input_ptr.view(-1, n_cols), Y_ptr.view(-1)
    columns = torch.arange(n_cols, device=saved.device)
    grad = (saved.float() - stats_ptr[:, :1]).exp() / stats_ptr[:, 1:]
    grad = (grad - (columns == (labels - rank * n_cols)[:, None]).float()) * grad_output_ptr.view(-1, 1).float()
    saved.copy_(torch.where((labels == ignore_idx)[:, None], 0.0, grad))


def _statistics(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(largest logit, sum of exponentials beside it) of each row, fp32."""
    largest = logits.float().amax(-1)
    return largest, (logits.float() - largest[:, None]).exp().sum(-1)


def _keep(stats: Tensor, largest: Tensor, total: Tensor) -> None:
    stats.copy_(torch.stack([largest, total], 1))


def _at_label(logits: Tensor, labels: Tensor) -> Tensor:
    """-inf where another TP rank has the label's column, or none has."""
    here = (labels >= 0) & (labels < logits.shape[-1])
    found = logits.gather(1, torch.where(here, labels, 0)[:, None]).squeeze(1).float()
    return torch.where(here, found, float("-inf"))


def _losses(at_label: Tensor, largest: Tensor, total: Tensor, labels: Tensor, ignore_idx: int) -> Tensor:
    return torch.where(labels == ignore_idx, 0.0, largest + total.log() - at_label)


REPLACED = {
    function.__name__: PlainKernel(function)
    for function in (
        cross_entropy_forward_kernel, cross_entropy_tp_pre_kernel, cross_entropy_tp_post_kernel,
        cross_entropy_backward_kernel,
    )
}  # fmt: skip
