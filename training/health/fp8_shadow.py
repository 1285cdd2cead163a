"""A window on what fp8 or fp4 changes: some microbatches run in bf16, too, with the same weights, and are compared.

Training in few bits can go wrong without a NaN or Inf: a scale that saturates, or a layer that needs more bits,
shows as a loss that is only worse than it would be. The window's difference is there at once, with the layer's name.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from data.loader import Batch
from parallel import metrics
from parallel.config import PrecisionConfig
from parallel.ddp import Chunks, unwrap
from parallel.groups import Ranks
from program.errors import SharedFault
from training.checkpoint.agreement import gathered
from training.forward_backward import run_schedule
from training.health.names import parameter_names
from training.health.replay import Before
from training.loop import Callback
from training.progress import Progress
from training.step import StepResult


class ShadowWindow(Callback):
    """Every ``shadow.interval`` iterations, after the update: two passes over the iteration's first microbatch.

    Costs 2 / (microbatches of a step) of a step's time each, and of memory what a replay keeps. With virtual stages,
    whose schedule wants as many microbatches as pipeline ranks, that many run. Gradients go into the buffers that the
    next step clears, and are not reduced: each rank compares its own microbatch and its own part of each layer.
    Random numbers, routers' biases and fp8's scales are put back. The meters of experts and of multi-token prediction
    count the two passes, as they count a replay.
    """

    def __init__(
        self,
        precision: PrecisionConfig,
        chunks: Chunks,
        optimizer: MegatronOptimizer,
        ranks: Ranks,
        newest: Callable[[], Sequence[Batch | None]],
        *,
        seq_length: int,
        micro_batch_size: int,
    ) -> None:
        """newest: this rank's microbatches of the iteration that has just ended."""
        assert precision.shadow is not None
        self.shadow, self.precision, self.chunks, self.ranks = precision.shadow, precision, chunks, ranks
        self.newest = newest
        self.seq_length, self.micro_batch_size = seq_length, micro_batch_size
        self.before = Before(chunks, optimizer, ranks)
        self.blocks = by_block(chunks)

    def after_step(self, progress: Progress, result: StepResult) -> None:
        """Collective. Raises SharedFault, on every rank, with ``shadow.stop`` where a difference is too large."""
        if progress.iteration % self.shadow.interval:
            return
        microbatches = self.newest()[: self.ranks.layout.pp if self.ranks.layout.vpp > 1 else 1]
        metrics.begin_step()
        self.before.keep()
        few_bits = self._measure(microbatches)
        with in_16_bits(self.chunks):
            bf16 = self._measure(microbatches)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        metrics.discard_step()
        loss, *norms = map(difference, few_bits.tolist(), bf16.tolist())
        worst = max(range(len(norms)), key=norms.__getitem__)
        everyones = gathered([(loss, norms[worst], list(self.blocks)[worst])], self.ranks)
        self._report(progress, max(loss for loss, _, _ in everyones), *max(each[1:] for each in everyones))

    def _measure(self, microbatches: Sequence[Batch | None]) -> Tensor:
        """fp64 [1 + blocks]: the loss, nats per token, 0 but on the last stage, and each block's gradient norm."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        with apart(self.chunks):
            total, tokens = run_schedule(
                self.chunks, microbatches, self.ranks, self.seq_length, self.micro_batch_size, forward_only=False
            )
        self.before.restore()
        gradients = [[param.main_grad for param in params] for params in self.blocks.values()]
        norms = [torch.stack(torch._foreach_norm(found, 2, torch.float32)).norm() for found in gradients]
        return torch.stack([total / tokens.clamp(min=1), *norms]).double()

    def _report(self, progress: Progress, loss: float, norm: float, block: str) -> None:
        metrics.record("fp8/shadow_loss_difference", loss, reduce="max")
        metrics.record("fp8/shadow_grad_norm_difference", norm, reduce="max")
        name = self.precision.products
        text = (
            f"iteration {progress.iteration}: {name} against bf16, the same weights and microbatch: loss differs by "
            f"{loss:.2%}, gradient norm by {norm:.2%} in {block}"
        )
        if max(loss, norm) <= self.shadow.bound:
            self.ranks.say(text)
            return
        other = "another precision.fp8_recipe" if name == "fp8" else "precision.fp8"
        text += (
            f", more than precision.fp8_shadow's {self.shadow.bound:.2%}. Keep such layers in bf16 "
            f"(precision.first_last_layers_bf16), take {other}, "
            f"or leave precision.{name} out"
        )
        if self.shadow.stop:
            raise SharedFault(f"{text}. Stopped (precision.fp8_shadow); the newest checkpoint is from before.")
        self.ranks.say(f"warning: {text}")


def difference(found: float, bf16: float) -> float:
    """Relative to bf16; Inf where only one is 0, or one is no finite number."""
    if found == bf16:
        return 0.0
    return abs(found - bf16) / bf16 if math.isfinite(found) and math.isfinite(bf16) and bf16 else math.inf


def by_block(chunks: Chunks) -> dict[str, list[Any]]:
    """This rank's trained parameters by the part of a layer that holds them: layers.3.self_attention, layers.3.mlp,
    mtp.0.mlp; others by their own names."""
    found: dict[str, list[Any]] = {}
    for param, name in parameter_names(chunks).items():
        found.setdefault(_block(name), []).append(param)
    return found


def _block(name: str) -> str:
    """An MLP may be so small beside attention that a whole layer's norm would hide it."""
    kind, number, rest = [*name.split(".", 2), ""][:3]
    if kind not in ("layers", "mtp"):
        return name
    return f"{kind}.{number}.{'mlp' if rest.startswith(('mlp.', 'pre_mlp_layernorm.')) else 'self_attention'}"


@contextlib.contextmanager
def apart(chunks: Chunks) -> Iterator[None]:
    """Within, a backward pass adds to this rank's own gradients, and no reduction begins."""
    config = chunks[0].config
    names = ("no_sync_func", "grad_sync_func", "finalize_model_grads_func")
    kept = {name: getattr(config, name) for name in names}
    config.no_sync_func, config.grad_sync_func = contextlib.nullcontext, None
    config.finalize_model_grads_func = lambda *_, **__: None
    try:
        with contextlib.ExitStack() as stack:
            for chunk in chunks:
                stack.enter_context(chunk.no_sync())
            yield
    finally:
        for name, value in kept.items():
            setattr(config, name, value)


@contextlib.contextmanager
def in_16_bits(chunks: Chunks) -> Iterator[None]:
    """Within, all products are in 16 bits: megatron-core asks its configs, of which some modules have copies.

    Of weights in fp8, Transformer Engine 2.19 multiplies copies in 16 bits, and looks for the fp32 gradients that it
    accumulates at the copies: autograd takes the gradients to the weights instead.
    """
    modules: list[Any] = [module for chunk in chunks for module in unwrap(chunk).modules()]
    fused = [
        module
        for module in modules
        if getattr(module, "fuse_wgrad_accumulation", False) and getattr(module, "primary_weights_in_fp8", False)
    ]
    found = [getattr(module, "config", None) for module in modules]
    configs = {id(config): config for config in found if isinstance(config, TransformerConfig)}.values()
    kept = [(config, config.fp8, config.fp4) for config in configs]
    try:
        for config in configs:
            config.fp8 = config.fp4 = None
        for module in fused:
            module.fuse_wgrad_accumulation = False
        yield
    finally:
        for module in fused:
            module.fuse_wgrad_accumulation = True
        for config, fp8, fp4 in kept:
            config.fp8, config.fp4 = fp8, fp4
