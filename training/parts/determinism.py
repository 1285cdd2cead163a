"""torch's switches for debugging, on every rank before anything computes."""

import torch

from training.config.train_config import TrainConfig


def set_debugging(train: TrainConfig) -> None:
    """train.deterministic_mode and train.detect_anomaly.

    Operations without a deterministic kernel raise, and torch.empty gives NaN. Anomaly detection keeps the forward
    pass's stack for each operation, for errors of the backward pass; it does not look for NaN, which fault.nonfinite
    does: that names rank, microbatch and module, after the same microbatches ran again.
    """
    if train.deterministic_mode:  # the call imports torch's compiler, seconds on every rank
        torch.use_deterministic_algorithms(True)
    torch.autograd.set_detect_anomaly(train.detect_anomaly, check_nan=False)
