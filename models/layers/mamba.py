"""Mamba-2's layer: megatron-core's mixer with mamba_ssm's kernels where these are installed, else one in plain torch.

Both have the same parameters, shards and names on disk: a checkpoint moves between the two.
"""

from typing import Any, ClassVar

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mamba_context_parallel import MambaContextParallel, _undo_attention_load_balancing
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import HAVE_MAMBA_SSM, MambaMixer, MambaMixerSubmodules
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import Tensor, nn
from torch.nn import functional

from models.costs.parameters import MAMBA_TAPS as TAPS
from models.layers.documents import Documents, kept_apart
from models.layers.ssd import causal_conv, chunked_scan
from models.layers.whole_matrices import SplitOverTP, one_tensor_each

NORM_EPSILON = 1e-5
"""Of the gated norm, mcore's, whatever model.norm_epsilon is."""
FUSED = {"norm.": "mixer.in_proj.layer_norm_"}
"""On-disk name of the layer's norm where it stands alone -> of one fused into the projection behind it."""


def has_kernels(device: torch.device) -> bool:
    """Whether Mamba layers on ``device`` run by mamba_ssm's kernels."""
    return device.type == "cuda" and HAVE_MAMBA_SSM


def mamba_layer(backend: BackendSpecProvider, norm: Any, on_cpu: bool) -> ModuleSpec:
    """The specification of a Mamba-2 layer for mcore's HybridModel."""
    fused = backend.fuse_layernorm_and_linear()
    column = backend.column_parallel_layer_norm_linear() if fused else backend.column_parallel_linear()
    mixer = ModuleSpec(
        module=KernelMambaMixer if HAVE_MAMBA_SSM and not on_cpu else TorchMambaMixer,
        submodules=MambaMixerSubmodules(in_proj=column, out_proj=backend.row_parallel_linear()),
    )
    return ModuleSpec(
        module=MambaLayer,
        submodules=MambaLayerSubmodules(
            norm=IdentityOp if fused else norm,
            mixer=mixer,
            mamba_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map={} if fused else FUSED,
        ),
    )


class GroupedRMSNorm(SplitOverTP):
    """RMSNorm of each group's channels apart, in fp32: mamba_ssm's RMSNormGated once its gate is applied."""

    split: ClassVar = {"weight": 0}

    def __init__(self, size: int, group_size: int, dtype: torch.dtype, device: torch.device, tp_group: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype, device=device))
        self.group_size, self.tp_group = group_size, tp_group

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        grouped = x.float().unflatten(-1, (-1, self.group_size))
        normed = functional.rms_norm(grouped, (self.group_size,), eps=NORM_EPSILON).flatten(-2)
        return (normed * self.weight.float()).to(x.dtype)


class _Mixer(MambaMixer):
    """What mcore's mixer lacks for sharded weights, and for one tensor on disk of a matrix whose parts TP splits apart,
    as a gated fc1 has it."""

    def give_parameters(self) -> None:
        """Let the exchange over CP have the parameters that there are now: with weights in shards others than at the
        start."""
        for name in ("conv1d_weight", "conv1d_bias", "dt_bias", "A_log", "D"):
            setattr(self.cp, f"{name}_cp1", getattr(self, name))

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return one_tensor_each(super().sharded_state_dict(*args, **kwargs))

    def in_torch(self, hidden_states: Tensor, packed: Documents | None) -> tuple[Tensor, Tensor | None]:
        """[s/tp, b, h] -> [s/tp, b, h] and no bias, on any device."""
        self.give_parameters()
        projected, _ = self.in_proj(hidden_states)
        whole = self.cp.pre_conv_ssm(projected).transpose(0, 1)  # [b, s, z x B C dt of this rank's heads]
        documents = None if packed is None else starts_of_all(packed, self.pg_collection.cp)
        y = self.mix(whole, documents)
        return self.out_proj(self.norm(self.cp.post_conv_ssm(y.transpose(0, 1).contiguous())))

    def mix(self, whole: Tensor, documents: Tensor | None) -> Tensor:
        """Convolution, state space model and gate: [b, s, z x B C dt] -> [b, s, channels]."""
        cp = self.cp
        inner, states = cp.d_inner_local_tpcp, cp.ngroups_local_tpcp * self.d_state
        z, mixed, dt = whole.split([inner, inner + 2 * states, cp.nheads_local_tpcp], dim=-1)
        mixed = causal_conv(mixed, cp.get_conv1d_weight(), cp.get_conv1d_bias(), documents)
        x, b, c = mixed.split([inner, states, states], dim=-1)
        x = x.unflatten(-1, (-1, self.headdim))
        step = functional.softplus(dt.double() + cp.get_dt_bias().double())
        b, c = (one.unflatten(-1, (-1, self.d_state)) for one in (b, c))
        y = chunked_scan(x, step, -cp.get_A_log().double().exp(), b, c, documents)
        y = (y + cp.get_D().float()[:, None] * x.float()).flatten(2)
        return (y * functional.silu(z.float())).to(whole.dtype)


class KernelMambaMixer(_Mixer):
    """mcore's, on mamba_ssm's and causal_conv1d's kernels; but in torch, documents packed into samples of which several
    context ranks have parts."""

    def forward(self, hidden_states: Tensor, *args: Any, packed_seq_params: Documents | None = None, **kwargs: Any
                ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        documents = kept_apart(packed_seq_params)
        if documents is not None and self.cp.cp_size > 1:
            return self.in_torch(hidden_states, documents)
        self.give_parameters()
        return super().forward(hidden_states, *args, packed_seq_params=documents, **kwargs)


class TorchMambaMixer(_Mixer):
    """mcore's mixer without its kernels, on any device: its parameters, its shards over TP, its exchange over CP.

    TP splits heads and groups; CP gives each rank the whole sequence of some heads, by an all-to-all. Documents packed
    into a sample start with no state, and the convolution does not reach into the one before. mcore's own constructor
    raises without mamba_ssm and allocates on CUDA.
    """

    def __init__(
        self, config: TransformerConfig, submodules: MambaMixerSubmodules, d_model: int, *,
        layer_number: int | None = None, pg_collection: ProcessGroupCollection, pp_layer_offset: int = 0,
        name: str | None = None,
    ) -> None:  # fmt: skip
        MegatronModule.__init__(self, config)
        assert config.mamba_num_heads is not None
        self.layer_number, self.pg_collection, self.tp_group = layer_number, pg_collection, pg_collection.tp
        self.d_state, self.headdim, tp = config.mamba_state_dim, config.mamba_head_dim, pg_collection.tp.size()
        self.nheads, self.ngroups = config.mamba_num_heads, config.mamba_num_groups
        self.nheads_local_tp, self.ngroups_local_tp = self.nheads // tp, self.ngroups // tp
        self.d_inner = self.nheads * self.headdim
        self.d_inner_local_tp = self.d_inner // tp
        device = torch.device("cpu") if config.use_cpu_initialization else torch.device("cuda")
        self.in_proj = build_module(
            submodules.in_proj, d_model, 2 * self.d_inner + 2 * self.ngroups * self.d_state + self.nheads,
            config=config, init_method=config.init_method, gather_output=False, bias=False, skip_bias_add=False,
            is_expert=False, tp_comm_buffer_name="fc1", tp_group=self.tp_group,
        )  # fmt: skip
        channels, dtype = self.d_inner_local_tp + 2 * self.ngroups_local_tp * self.d_state, config.params_dtype
        self.conv1d_weight = split_parameter(torch.empty(channels, 1, TAPS, dtype=dtype, device=device))
        self.conv1d_bias = split_parameter(torch.empty(channels, dtype=dtype, device=device))
        self.dt_bias = split_parameter(torch.empty(self.nheads_local_tp, dtype=dtype, device=device))
        self.A_log = split_parameter(torch.empty(self.nheads_local_tp, dtype=torch.float32, device=device))
        self.D = split_parameter(torch.empty(self.nheads_local_tp, dtype=torch.float32, device=device))
        self.norm = GroupedRMSNorm(self.d_inner_local_tp, self.d_inner // self.ngroups, dtype, device, pg_collection.tp)
        mark_split(self.norm.weight)
        self.out_proj = build_module(
            submodules.out_proj, self.d_inner, d_model, config=config, init_method=config.output_layer_init_method,
            bias=False, input_is_parallel=True, skip_bias_add=True, is_expert=False, tp_comm_buffer_name="fc2",
            tp_group=self.tp_group,
        )  # fmt: skip
        self.cp = MambaContextParallel(
            cp_group=pg_collection.cp, d_inner_local_tp=self.d_inner_local_tp, nheads_local_tp=self.nheads_local_tp,
            ngroups_local_tp=self.ngroups_local_tp, d_state=self.d_state, conv1d_weight_cp1=self.conv1d_weight,
            conv1d_bias_cp1=self.conv1d_bias, conv1d_padding=TAPS - 1, dt_bias_cp1=self.dt_bias, A_log_cp1=self.A_log,
            D_cp1=self.D, D_has_hdim=False,
        )  # fmt: skip

    def forward(self, hidden_states: Tensor, *args: Any, packed_seq_params: Documents | None = None, **kwargs: Any
                ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        return self.in_torch(hidden_states, kept_apart(packed_seq_params))


def starts_of_all(packed: Documents, context: Any) -> Tensor:
    """Where each token's document starts [b, s]: of the whole sequences, as a context rank has them for its heads."""
    if context.size() == 1:
        return packed.starts
    mine = packed.starts.transpose(0, 1).contiguous()
    parts = [torch.empty_like(mine) for _ in range(context.size())]
    torch.distributed.all_gather(parts, mine, group=context)
    return _undo_attention_load_balancing(torch.cat(parts), context.size()).transpose(0, 1)


def split_parameter(values: Tensor) -> nn.Parameter:
    """A parameter of which TP gives each rank some rows."""
    parameter = nn.Parameter(values)
    mark_split(parameter)
    return parameter


def mark_split(parameter: Tensor) -> None:
    parameter.tensor_model_parallel, parameter.partition_dim = True, 0  # type: ignore[attr-defined]
