"""The loss of multi-token prediction (MTP, arXiv:2412.19437, section 2.2), the same under context parallelism."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.hybrid import hybrid_model
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper, roll_tensor
from torch import Tensor

from models.layers.chunked_losses import chunked_head
from models.layers.cross_entropy import LossesAndLogZ
from models.layers.token_counts import token_counts


def install() -> None:
    """Let HybridModel, which calls it by its name in its own module, use ours."""
    hybrid_model.process_mtp_loss = process_mtp_loss


def mend(chunk: HybridModel) -> None:
    """What megatron-core 0.19.2 gets wrong in a chunk that has been built with MTP.

    With tied embeddings, the output layer's weight is the copy of the word embeddings that MTP has on its stage; mcore
    makes another one, which no checkpoint can name. And full recomputation must say 1 to an MTP layer, which is one
    unit, whatever number of layers it says to the stack. A depth takes the tokens after its own over the ends of
    documents, which see one another here, where mcore would look for its own kind of ``packed_seq_params``.
    """
    if chunk.share_embeddings_and_output_weights and not chunk.pre_process:
        chunk.output_layer.register_parameter("weight", None)
    for layer in chunk.mtp.layers:
        if layer.config.recompute_granularity == "full":
            layer.config = copy.copy(layer.config)
            layer.config.recompute_num_layers = 1
        layer._get_embeddings = _over_documents(layer._get_embeddings)


def _over_documents(embeddings: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        return embeddings(*args, **kwargs)

    return call


def process_mtp_loss(
    hidden_states: Tensor,
    labels: Tensor | None,
    loss_mask: Tensor | None,
    output_layer: Callable[..., tuple[Tensor, Tensor | None]],
    output_weight: Tensor | None,
    runtime_gather_output: bool | None,
    is_training: bool,
    compute_language_model_loss: Callable[[Tensor, Tensor], Tensor],
    config: TransformerConfig,
    cp_group: dist.ProcessGroup | None = None,
    **_ignored: Any,
) -> Tensor:
    """Hang the loss of each depth onto the gradient of the trunk's output, and return that output.

    hidden_states: [(1 + depths) s/cp, b, h], the trunk's output and each depth's one after another; labels and
    loss_mask [b, s/cp].

    Each depth's loss is a mean over the tokens of the global batch that have something to predict at that depth:
    its sum is multiplied by what all gradients are divided by in the end, and divided by the number of those tokens.
    mcore's own function divides within a microbatch, on each context rank alone: losses then depend on both.
    """
    trunk, *depths = hidden_states.chunk(1 + config.mtp_num_layers, dim=0)
    if labels is None or not torch.is_grad_enabled():  # no weight is trained by it
        return trunk
    counts = token_counts(config)
    mask = torch.ones_like(labels) if loss_mask is None else loss_mask
    head = chunked_head(output_layer)
    if head is not None:
        compute_language_model_loss = head.losses
    if isinstance(compute_language_model_loss, LossesAndLogZ):  # a user's own loss is of the next token alone
        compute_language_model_loss = compute_language_model_loss.plain
    for number, hidden in enumerate(depths):
        labels, _ = roll_tensor(labels, shifts=-1, dims=-1, cp_group=cp_group)
        mask, tokens = roll_tensor(mask, shifts=-1, dims=-1, cp_group=cp_group)
        if head is not None:
            losses = mask * head.losses_of(hidden, output_weight, labels, compute_language_model_loss)
        else:
            logits, _ = output_layer(hidden, weight=output_weight, runtime_gather_output=runtime_gather_output)
            losses = mask * compute_language_model_loss(labels, logits)
        if is_training:
            unknown = torch.zeros((), device=losses.device)  # how often a depth's guess is right is not measured
            MTPLossLoggingHelper.save_metrics_to_tracker(losses.sum(), unknown, tokens, number, config.mtp_num_layers)
        weight = config.mtp_loss_scaling_factor / config.mtp_num_layers
        trunk = MTPLossAutoScaler.apply(trunk, weight * losses * (counts.counted / counts.depths[number]))
    return trunk
