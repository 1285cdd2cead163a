"""fp16's loss scale as an iteration finds it: making gradients ready moves it, whether there is an update or not."""

import math

from megatron.core.optimizer import MegatronOptimizer


class LossScale:
    """Kept while an iteration decides which of several attempts counts. 1.0, and nothing to keep, but with fp16."""

    def __init__(self, optimizer: MegatronOptimizer) -> None:
        parts = getattr(optimizer, "chained_optimizers", [optimizer])
        scalers = [scaler for part in parts if (scaler := getattr(part, "grad_scaler", None)) is not None]
        self._scale = optimizer.get_loss_scale() if scalers else None  # mcore replaces its tensors, and fills none
        self.kept = [(scaler, dict(vars(scaler))) for scaler in scalers]

    @property
    def value(self) -> float:
        """As it was found. With fp16, waits for the device."""
        return 1.0 if self._scale is None else float(self._scale)

    @property
    def is_lowest(self) -> bool:
        """Whether it is fixed, or as low as it may become. With fp16, waits for the device."""
        return all(self.value <= float(getattr(scaler, "min_scale", math.inf)) for scaler, _ in self.kept)

    def restore(self) -> None:
        """As it was found: the same microbatches come once more."""
        for scaler, state in self.kept:
            vars(scaler).update(state)
