"""fp16 gradients that overflow in row after row: the loss scale is not to blame once it can go no lower."""

from training.progress import Progress
from training.step import GradientResult

MOST_OVERFLOWS = 10
"""In a row, at the lowest loss scale, after which no further one will do."""


class Overflows:
    """Counts them. The same on every rank, as the loss scale is."""

    def __init__(self) -> None:
        self.in_a_row = 0

    def hopeless(self, gradients: GradientResult, progress: Progress) -> str | None:
        """In words, why training cannot go on with what overflows; None while the loss scale may still help."""
        self.in_a_row = self.in_a_row + 1 if gradients.overflowed and gradients.scale_is_lowest else 0
        if self.in_a_row < MOST_OVERFLOWS:
            return None
        return (
            f"iteration {progress.iteration + 1}: fp16 gradients have overflowed in {self.in_a_row} iterations in a "
            f"row, while the loss ({gradients.loss:g}) is finite, at loss scale {gradients.loss_scale:g}, which goes "
            "no lower (precision.min_loss_scale, or a fixed precision.loss_scale). No weight was changed in any of "
            'them. precision.dtype = "bf16" does not overflow; or lower optimizer.lr, which may have led here'
        )
