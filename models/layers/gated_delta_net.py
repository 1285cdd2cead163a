"""The gated delta net's layer: megatron-core's with flash-linear-attention's kernels where these are installed, else in
plain torch.

Both have the same parameters, shards and names on disk: a checkpoint moves between the two.
"""

from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.ssm.gated_delta_net.common import (
    HAVE_FLA,
    _build_head_perm_for_split_sections,
    get_parameter_local_cp,
    tensor_a2a_cp2hp,
    tensor_a2a_hp2cp,
)
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn
from torch.nn import functional

from models.costs.parameters import MAMBA_TAPS
from models.layers.delta_rule import gated_delta_rule, normalised
from models.layers.documents import Documents, kept_apart
from models.layers.mamba import mark_split, split_parameter, starts_of_all
from models.layers.ssd import causal_conv
from models.layers.whole_matrices import one_tensor_each

FUSED = {"input_layernorm.": "self_attention.in_proj.layer_norm_"}
"""On-disk name of the layer's norm where it stands alone -> of one fused into the projection behind it."""


def gated_delta_net_layer(backend: BackendSpecProvider, norm: Any, on_cpu: bool) -> ModuleSpec:
    """The specification of a gated delta net for mcore's HybridModel."""
    fused = backend.fuse_layernorm_and_linear()
    mixer = ModuleSpec(
        module=KernelGatedDeltaNet if HAVE_FLA and not on_cpu else TorchGatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=backend.column_parallel_layer_norm_linear() if fused else backend.column_parallel_linear(),
            out_norm=HeadNorm,
            out_proj=backend.row_parallel_linear(),
        ),
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=IdentityOp if fused else norm,
            self_attention=mixer,
            self_attn_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map={} if fused else FUSED,
        ),
    )


class HeadNorm(nn.RMSNorm):
    """RMSNorm of each head's values, of weights around 1 whatever model.layernorm_zero_centered_gamma is, as Qwen3-Next
    has it."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)


class _GatedDeltaNet(GatedDeltaNet):
    """Its forward pass in plain torch, on any device."""

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return one_tensor_each(super().sharded_state_dict(*args, **kwargs))

    def in_torch(self, hidden_states: Tensor, packed: Documents | None) -> tuple[Tensor, Tensor | None]:
        """[s/tp, b, h] -> [s/tp, b, h] and no bias. CP gives each rank the whole sequence of some heads, by an
        all-to-all; documents packed into a sample start with no state."""
        group, keys, values = self.pg_collection.cp, self.qk_dim_local_tp, self.v_dim_local_tp
        projected, _ = self.in_proj(hidden_states)
        if self.cp_size > 1:
            order = _build_head_perm_for_split_sections(self.in_proj_split_sections, self.cp_size, projected.device)
            projected = projected.index_select(-1, order)
        whole = tensor_a2a_cp2hp(projected, seq_dim=0, head_dim=-1, cp_group=group).transpose(0, 1)
        mixed, gate, beta, alpha = whole.split(self.feat_dim_split, dim=-1)
        documents = None if packed is None else starts_of_all(packed, group)
        weight = get_parameter_local_cp(self.conv1d.weight, 0, group, [keys, keys, values])
        mixed = causal_conv(mixed, weight, None, documents).float()
        query, key, value = mixed.split([size // self.cp_size for size in (keys, keys, values)], dim=-1)
        query, key = (normalised(one.unflatten(-1, (-1, self.key_head_dim))) for one in (query, key))
        each = self.num_value_heads // self.num_key_heads
        query, key = (one.repeat_interleave(each, dim=2) for one in (query, key))
        steps = alpha.double() + get_parameter_local_cp(self.dt_bias, 0, group).double()
        decay = -get_parameter_local_cp(self.A_log, 0, group).double().exp() * functional.softplus(steps)
        value = value.unflatten(-1, (-1, self.value_head_dim))
        out = gated_delta_rule(query, key, value, decay, beta.float().sigmoid(), documents)
        gate = gate.unflatten(-1, (-1, self.value_head_dim))
        out = self._apply_gated_norm(out.to(whole.dtype), gate).flatten(2).transpose(0, 1).contiguous()
        return self.out_proj(tensor_a2a_hp2cp(out, seq_dim=0, head_dim=-1, cp_group=group))

    def _apply_gated_norm(self, x: Tensor, gate: Tensor) -> Tensor:
        """[..., v] -> the same. Each TP rank norms its heads by the one weight, whose gradients are summed."""
        weight = copy_to_tensor_model_parallel_region(self.out_norm.weight, self.tp_group)
        normed = functional.rms_norm(x, x.shape[-1:], weight, self.out_norm.eps)
        return (normed.float() * functional.silu(gate.float().reshape(x.shape))).to(x.dtype)


class KernelGatedDeltaNet(_GatedDeltaNet):
    """mcore's, on flash-linear-attention's kernels; but packed documents, which it would not see, in torch."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any,
                packed_seq_params: Documents | None = None, **kwargs: Any) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        if (documents := kept_apart(packed_seq_params)) is not None:
            return self.in_torch(hidden_states, documents)
        return super().forward(hidden_states, attention_mask, *args, **kwargs)


class TorchGatedDeltaNet(_GatedDeltaNet):
    """mcore's parameters and shards. Its own constructor raises without flash-linear-attention, and allocates on
    CUDA."""

    def __init__(
        self, config: TransformerConfig, submodules: GatedDeltaNetSubmodules, layer_number: int | None = None, *,
        pg_collection: ProcessGroupCollection, name: str | None = None, cp_comm_type: str | None = None,
    ) -> None:  # fmt: skip
        MegatronModule.__init__(self, config)
        self.layer_number, self.pg_collection, self.tp_group = layer_number, pg_collection, pg_collection.tp
        self.tp_size, self.cp_size, self.conv_bias = pg_collection.tp.size(), pg_collection.cp.size(), False
        self.key_head_dim, self.value_head_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.num_key_heads, self.num_value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.qk_dim, self.v_dim = self.key_head_dim * self.num_key_heads, self.value_head_dim * self.num_value_heads
        self.qk_dim_local_tp, self.v_dim_local_tp = self.qk_dim // self.tp_size, self.v_dim // self.tp_size
        self.num_v_heads_local_tp = self.num_value_heads // self.tp_size
        self._setup_variant_attrs()
        self.in_proj_dim = 2 * self.qk_dim + 2 * self.v_dim + self.in_proj_extra_dim
        self.conv_dim_local_tp = (2 * self.qk_dim + self.v_dim) // self.tp_size
        options = {"config": config, "bias": False, "is_expert": False, "tp_group": self.tp_group}
        self.in_proj = build_module(
            submodules.in_proj, config.hidden_size, self.in_proj_dim, init_method=config.init_method,
            gather_output=False, skip_bias_add=False, tp_comm_buffer_name="fc1", **options,
        )  # fmt: skip
        device = torch.device("cpu") if config.use_cpu_initialization else torch.device("cuda")
        empty = {"dtype": config.params_dtype, "device": device}
        channels = self.conv_dim_local_tp
        self.conv1d = nn.Conv1d(channels, channels, MAMBA_TAPS, groups=channels, bias=False, **empty)
        mark_split(self.conv1d.weight)
        self.dt_bias = split_parameter(torch.empty(self.dt_bias_dim, **empty))
        self.A_log = split_parameter(torch.empty(self.a_log_dim, **empty))
        self.out_norm = submodules.out_norm(config, self.value_head_dim, config.layernorm_epsilon)
        self.out_proj = build_module(
            submodules.out_proj, self.v_dim, config.hidden_size, init_method=config.output_layer_init_method,
            input_is_parallel=True, skip_bias_add=True, tp_comm_buffer_name="fc2", **options,
        )  # fmt: skip

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any,
                packed_seq_params: Documents | None = None, **kwargs: Any) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        return self.in_torch(hidden_states, kept_apart(packed_seq_params))
