"""Which attention Transformer Engine has chosen: it does so at the first step, by card, number format and shapes."""

from collections.abc import Callable

from training.loop import Callback
from training.progress import Progress
from training.step import StepResult


class AttentionBackend(Callback):
    """Says it once, after the first step."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say, self.said = say, False

    def after_step(self, progress: Progress, result: StepResult) -> None:
        if not self.said:
            self.said = True
            self.say(f"attention backend: {chosen()}")


def chosen() -> str:
    """By the names of kernels.attention_backend."""
    from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends as found

    if found["use_flash_attention"]:
        return f"flash (flash-attn {found['flash_attention_backend']})"
    return "fused (cuDNN)" if found["use_fused_attention"] else "unfused"
