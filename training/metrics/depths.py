"""The losses of multi-token prediction (MTP, arXiv:2412.19437, section 2.2), one for each depth."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper, MultiTokenPredictionBlock
from torch import nn

from models.shapes import GPTShape
from parallel.groups import Ranks
from training.metrics.values import Value


class DepthMeter:
    """Averages what models/layers/mtp.py notes in training. Costs nothing but a count per microbatch."""

    def __init__(self, shape: GPTShape, chunks: Sequence[nn.Module], ranks: Ranks) -> None:
        """``chunks``: this rank's, wrapped or not."""
        self.depths, self.ranks = shape.mtp_num_layers, ranks
        self.microbatches = 0
        for chunk in chunks:
            for module in chunk.modules():
                if isinstance(module, MultiTokenPredictionBlock):
                    module.register_forward_hook(self._count)
        MTPLossLoggingHelper.clean_metrics_in_tracker()

    def report(self) -> dict[str, Value]:
        """``mtp_loss``: each depth's loss in nats per token since the last report, unweighted; the same on every rank.

        Mean over microbatches of their means over tokens. Nothing when none ran. Collective: one all-reduce of a
        few numbers over all ranks; those of other stages add zeros, TP peers add the same.
        """
        *sums, parts = self._sums()
        # Each context rank noted its part of every microbatch's mean: the parts of cp ranks make one microbatch.
        return {"mtp_loss": [total / parts * self.ranks.layout.cp for total in sums]} if parts else {}

    def _count(self, module: nn.Module, _inputs: object, _outputs: object) -> None:
        self.microbatches += module.training and torch.is_grad_enabled()

    def _sums(self) -> list[float]:
        """Over all ranks: each depth's losses, and the number of microbatches. Resets."""
        noted = MTPLossLoggingHelper.tracker.get("loss_values", torch.zeros(self.depths))
        count = torch.tensor([self.microbatches], dtype=torch.float64, device=self.ranks.device)
        packed = torch.cat([noted.to(count), count])
        dist.all_reduce(packed)
        self.microbatches = 0
        MTPLossLoggingHelper.clean_metrics_in_tracker()
        return packed.tolist()
