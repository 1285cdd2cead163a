"""Gradients of weights that are added up by the product that makes them (gradient accumulation fusion)."""

from types import SimpleNamespace

from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.tensor_parallel import layers
from torch import Tensor


def fuse(chunk: HybridModel) -> None:
    """In Transformer Engine's modules, and in mcore's output layer, whose kernel is APEX's: here Transformer Engine's.

    Not by mcore's field of the configuration: its layers would then ask for APEX.
    """
    for module in chunk.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True
    if hasattr(chunk, "output_layer"):
        layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(
            wgrad_gemm_accum_fp32=accumulate, wgrad_gemm_accum_fp16=accumulate
        )
        chunk.output_layer.gradient_accumulation_fusion = True
        _mark_shared(chunk)


def accumulate(inputs: Tensor, gradients: Tensor, main_grad: Tensor) -> None:
    """main_grad [out, in] += gradients^T [out, tokens] @ inputs [tokens, in], which may be of 16 bits."""
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    general_gemm(
        inputs, gradients, out_dtype=main_grad.dtype, layout="NT", out=main_grad, accumulate=True, grad=True
    )  # fmt: skip


def _mark_shared(chunk: HybridModel) -> None:
    """A weight that a chunk also looks words up in gets that gradient as usual, beside the one that is added here.

    mcore marks it without pipeline stages only, where alone GPT has both; multi-token prediction has both on its stage.
    """
    embedding = getattr(chunk, "embedding", None)
    if chunk.share_embeddings_and_output_weights and embedding is not None:
        embedding.word_embeddings.weight.zero_out_wgrad = True
