"""Which modules mcore builds a block from: Transformer Engine's on CUDA where it is installed, ours elsewhere.

Parameters keep Transformer Engine's names on disk in both cases, so a checkpoint moves between the two.
"""

import contextlib
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)
from torch import Tensor

from models.activations import ACTIVATIONS
from models.layers.activation import LearnedMLP
from models.layers.attention import SDPAttention
from models.layers.experts import sequential_experts
from models.layers.gated_delta_net import gated_delta_net_layer
from models.layers.mamba import mamba_layer
from models.layers.mla import LatentAttention
from models.layers.norm import build_norm
from models.layers.offload import Offload
from models.layers.parallel_residual import ParallelAttentionLayer, ParallelMLPLayer, join
from models.layers.projection import bias_dropout_add, with_bias, with_post_norm
from models.layers.self_attention import BlockAttention
from models.norms import NORMS
from models.shapes import GPTShape
from models.symbols import MLPS
from program.errors import SharedMistake

# On-disk names of a norm that stands alone -> of one fused into the linear layer behind it (Transformer Engine's).
FUSED_ATTENTION = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
FUSED_LATENT_ATTENTION = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}
FUSED_MLP = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}


class PortableProvider(LocalSpecProvider):
    """mcore's own linear layers, our norm and attention: runs on CPU and on CUDA without Transformer Engine."""

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> Any:
        return build_norm

    def core_attention(self) -> type:
        return SDPAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
        return sequential_experts(self)


def has_transformer_engine(device: torch.device) -> bool:
    """Whether blocks on ``device`` are made of Transformer Engine's modules."""
    return device.type == "cuda" and HAVE_TE


def provider(device: torch.device, documents: bool = False) -> BackendSpecProvider:
    """Transformer Engine's modules where there are CUDA and Transformer Engine, else ours.

    documents: those packed into a sample are kept apart, which our attention alone does (models/layers/documents.py).
    """
    if has_transformer_engine(device):
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

        backend = with_own_experts(TESpecProvider())
        return with_own_attention(backend) if documents else backend
    return PortableProvider()


def with_own_experts(backend: BackendSpecProvider) -> BackendSpecProvider:
    """Where experts are not multiplied together, ours: mcore's fail with biases."""
    together = backend.grouped_mlp_modules
    backend.grouped_mlp_modules = lambda grouped: together(grouped) if grouped else sequential_experts(backend)
    return backend


def with_own_attention(backend: BackendSpecProvider) -> BackendSpecProvider:
    """Its modules around our attention, for what Transformer Engine's does not have: documents, soft caps of scores."""
    backend.core_attention = lambda: SDPAttention
    return backend


class LayerStack(HybridStack):
    """mcore's stack of layers, with a final norm from our provider and dropout that differs over sequence shards.

    A stack of a pattern's single layers has the same keys on disk as one of blocks of two: layer i's attention or mixer
    is number 2 i there, its MLP 2 i + 1 (models/names.py).

    HybridStack hard-codes Transformer Engine's final norm (hybrid_block.py:212), and, unlike TransformerBlock, draws
    dropout of sequence-parallel shards from one common generator, so that all shards drop the same elements.
    """

    def __init__(self, config: TransformerConfig, *args: Any, post_process: bool = True, post_layer_norm: bool = True,
                 final_norm: Any = build_norm, single_layers: bool = False, **kwargs: Any) -> None:  # fmt: skip
        super().__init__(config, *args, post_process=post_process, post_layer_norm=False, **kwargs)
        self.post_layer_norm, self.single_layers = post_layer_norm, single_layers
        join(self.layers)
        self.offload: Offload | None = None
        if post_process and post_layer_norm:
            self.final_norm = final_norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """[s/tp, b, h] -> [s/tp, b, h]."""
        offloads = self.offload is not None and self.training and torch.is_grad_enabled()
        with (
            get_cuda_rng_tracker().fork() if self.config.sequence_parallel else contextlib.nullcontext(),
            self.offload.forward_pass() if self.offload and offloads else contextlib.nullcontext(),
        ):
            output = super().forward(*args, **kwargs)
        self.input_tensor = None  # else each chunk keeps its last input, and that input's gradient, to the next one
        return output

    def sharded_state_dict(self, prefix: str = "", *args: Any, **kwargs: Any) -> Any:
        found = super().sharded_state_dict(prefix, *args, **kwargs)
        for place, (layer, symbol) in enumerate(zip(self.layers, self.layer_type_list, strict=True)):
            if self.single_layers:
                own, number = f"{prefix}layers.{place}.", layer.layer_number - 1
                of_layer = {key: value for key, value in found.items() if key.startswith(own)}
                on_disk = f"{prefix}layers.{2 * number + (symbol in MLPS)}."
                replace_prefix_for_sharding(of_layer, f"{prefix}layers.{number}.", on_disk)
        return found


def stack_spec(config: TransformerConfig, backend: BackendSpecProvider, shape: GPTShape) -> ModuleSpec:
    """The specification of a stack of attention, MLP, expert and Mamba layers for mcore's HybridModel."""
    pattern = shape.hybrid_layer_pattern
    if not (isinstance(backend, PortableProvider) or NORMS[config.normalization].transformer_engine):
        raise SharedMistake(
            f"model.normalization {config.normalization}: Transformer Engine has no such norm. Use RMSNorm or "
            "LayerNorm, or ranks without Transformer Engine."
        )
    norm = backend.layer_norm(rms_norm=config.normalization == "RMSNorm")
    submodules = HybridStackSubmodules(
        attention_layer=_attention_layer(config, backend, norm, shape),
        mla_layer=_latent_attention_layer(config, backend, norm, shape),
        mlp_layer=_mlp_layer(backend, norm, shape),
        moe_layer=_moe_layer(config, backend, norm, shape),
        mtp_block_spec=_mtp_block(backend, norm),
    )
    if any(shape.linear_blocks):
        submodules.gdn_layer = gated_delta_net_layer(backend, norm, config.use_cpu_initialization)
    if "M" in pattern:
        submodules.mamba_layer = mamba_layer(backend, norm, config.use_cpu_initialization)
    params = {"final_norm": norm, "single_layers": bool(pattern)}
    return ModuleSpec(module=LayerStack, params=params, submodules=submodules)


def _input_linear(backend: BackendSpecProvider, shape: GPTShape) -> tuple[Any, bool]:
    """The first linear layer of attention or MLP, and whether a norm is to stand before it: not one that is fused into
    it, nor where there is none."""
    if shape.pre_norm and backend.fuse_layernorm_and_linear():
        return backend.column_parallel_layer_norm_linear(), False
    return backend.column_parallel_linear(), shape.pre_norm


def _output_linear(backend: BackendSpecProvider, norm: Any, shape: GPTShape) -> Any:
    """The last linear layer of attention or a dense MLP."""
    linear = backend.row_parallel_linear()
    return with_post_norm(linear, norm) if shape.post_norm else linear


def _attention_layer(config: TransformerConfig, backend: BackendSpecProvider, norm: Any, shape: GPTShape) -> ModuleSpec:
    linear, norm_before = _input_linear(backend, shape)
    qk_norm = backend.layer_norm(for_qk=True) if config.qk_layernorm else IdentityOp
    attention = ModuleSpec(
        module=BlockAttention,
        params={"attn_mask_type": AttnMaskType.causal, "shape": shape},
        submodules=SelfAttentionSubmodules(
            linear_qkv=linear,
            core_attention=backend.core_attention(),
            linear_proj=with_bias(_output_linear(backend, norm, shape), shape.proj_bias),
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )
    return ModuleSpec(
        module=ParallelAttentionLayer if shape.parallel_residual else TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm if norm_before else IdentityOp,
            self_attention=attention,
            self_attn_bda=bias_dropout_add(shape.residual_multiplier),
            sharded_state_dict_keys_map=FUSED_ATTENTION if norm_before else {},
        ),
    )


def _latent_attention_layer(
    config: TransformerConfig, backend: BackendSpecProvider, norm: Any, shape: GPTShape
) -> ModuleSpec:
    """Its first norm stands alone in Transformer Engine's spec too: two projections read its output."""
    fused = backend.fuse_layernorm_and_linear() and config.qk_layernorm
    alone = norm if config.qk_layernorm and not fused else IdentityOp
    up = backend.column_parallel_layer_norm_linear() if fused else backend.column_parallel_linear()
    # Transformer Engine repeats the narrow down projections on every TP rank; ours splits them, and gathers.
    down = backend.linear() if hasattr(backend, "linear") else backend.column_parallel_linear()
    attention = ModuleSpec(
        module=LatentAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=backend.column_parallel_linear(),
            linear_q_down_proj=down,
            linear_q_up_proj=up,
            linear_kv_down_proj=down,
            linear_kv_up_proj=up,
            core_attention=backend.core_attention(),
            linear_proj=backend.row_parallel_linear(),
            q_layernorm=alone,
            kv_layernorm=alone,
        ),
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=attention,
            self_attn_bda=bias_dropout_add(shape.residual_multiplier),
            sharded_state_dict_keys_map={} if fused else FUSED_LATENT_ATTENTION,
        ),
    )


def _mlp_layer(backend: BackendSpecProvider, norm: Any, shape: GPTShape) -> ModuleSpec:
    linear, norm_before = _input_linear(backend, shape)
    kind = LearnedMLP if ACTIVATIONS[shape.activation].learned else MLP
    mlp = partial(
        kind.as_mlp_submodule,
        submodules=MLPSubmodules(
            linear_fc1=with_bias(linear, shape.fc_bias),
            linear_fc2=with_bias(_output_linear(backend, norm, shape), shape.fc_bias),
        ),
    )
    return ModuleSpec(
        module=ParallelMLPLayer if shape.parallel_residual else MLPLayer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=norm if norm_before else IdentityOp,
            mlp=mlp,
            mlp_bda=bias_dropout_add(shape.residual_multiplier),
            sharded_state_dict_keys_map=FUSED_MLP if norm_before else {},
        ),
    )


def _moe_layer(config: TransformerConfig, backend: BackendSpecProvider, norm: Any, shape: GPTShape) -> ModuleSpec:
    """Its norm stands alone in Transformer Engine's spec too: the router and all experts read its output."""
    experts = get_moe_module_spec_for_backend(
        backend, num_experts=config.num_moe_experts or 1, moe_grouped_gemm=config.moe_grouped_gemm
    )
    return ModuleSpec(
        module=MoETransformerLayer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=norm, mlp=experts, mlp_bda=bias_dropout_add(shape.residual_multiplier)
        ),
    )


def _mtp_block(backend: BackendSpecProvider, norm: Any) -> ModuleSpec:
    """What surrounds the block of each multi-token-prediction depth; mcore builds that from the pattern."""
    layer = ModuleSpec(
        module=MultiTokenPredictionLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=norm, hnorm=norm, eh_proj=backend.column_parallel_linear(), mtp_model_layer=None, layer_norm=norm
        ),
    )
    return ModuleSpec(
        module=MultiTokenPredictionBlock, submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[layer])
    )
