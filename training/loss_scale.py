"""fp16's loss scale as an iteration finds it, and gradients made ready: both without a wait for the device."""

import math

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor


class LossScale:
    """Kept while an iteration decides which of several attempts counts. 1.0, and nothing to keep, but with fp16."""

    def __init__(self, optimizer: MegatronOptimizer) -> None:
        parts = _parts(optimizer)
        scalers = [scaler for part in parts if (scaler := getattr(part, "grad_scaler", None)) is not None]
        self.tensors = [optimizer.get_loss_scale()] if scalers else []  # mcore replaces its tensors, and fills none
        """fp32 [1] on the device; none but with fp16."""
        self.kept = [(scaler, dict(vars(scaler))) for scaler in scalers]

    def is_lowest(self, value: float) -> bool:
        """Whether it is fixed, or as low as it may become. Waits for the device."""
        return all(value <= float(getattr(scaler, "min_scale", math.inf)) for scaler, _ in self.kept)

    def update(self, overflowed: bool) -> None:
        """Move it by what became of these gradients. All ranks with the same answer."""
        for scaler, _ in self.kept:
            scaler.update(overflowed)

    def restore(self) -> None:
        """As it was found: the same microbatches come once more."""
        for scaler, state in self.kept:
            vars(scaler).update(state)


@torch.no_grad()
def prepare_gradients(optimizer: MegatronOptimizer, device: torch.device) -> Tensor:
    """Give the optimizer its gradients, with fp16 divided by the loss scale: whether this rank's overflow, fp64 [1].

    prepare_grads of megatron-core 0.19.2 reduces the overflow over ranks, reads it and moves the loss scale. Here it
    stays on the device and travels with the loss (``measure`` in training/step.py), and ``update`` moves the scale.
    """
    found = torch.zeros(1, dtype=torch.float64, device=device)
    for part in _parts(optimizer):
        if getattr(part, "grad_scaler", None) is None:
            part.prepare_grads()
        elif not part.is_stub_optimizer:
            part._copy_model_grads_to_main_grads()
            part.found_inf.fill_(0.0)
            gradients = part._collect_main_grad_data_for_unscaling()
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, part.found_inf, part.grad_scaler.inv_scale)
            found += part.found_inf
    return found


def _parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    return getattr(optimizer, "chained_optimizers", [optimizer])
