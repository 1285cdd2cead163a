"""The ``kernels`` section of a recipe: which fused kernels compute the model, and where each can run.

A fused kernel computes what several of PyTorch's do, with fewer launches and less memory traffic.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from models.shapes import GPTShape
from parallel.config import ParallelConfig

FusionName = Literal[
    "bias_activation_fusion", "apply_rope_fusion", "cross_entropy_loss_fusion", "gradient_accumulation_fusion",
    "moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion", "moe_shared_expert_overlap",
]  # fmt: skip


@dataclass(kw_only=True, slots=True, frozen=True)
class KernelsConfig:
    """Which kernels compute the model."""

    off: tuple[FusionName, ...] = ()
    """Fused kernels, by Megatron's names, that do not run. All others do where device, number format, model and layout
    allow it: a start says which."""

    attention_backend: Literal["auto", "flash", "fused", "unfused"] = "auto"
    """Of Transformer Engine's attention: flash-attn, cuDNN's fused kernel, or plain products. auto: it chooses."""

    tp_comm_overlap: bool = False
    """Products overlap with the collectives of TP, through Transformer Engine's userbuffers. Needs GPUs of one node for
    TP, and parallel.sequence_parallel. Not yet run on a GPU."""

    cuda_graph_impl: Literal["none", "local"] = "none"
    """local: Megatron's CUDA graphs of layers. One launch each for a layer's forward and its backward pass, from the
    second iteration on; layers of experts are launched kernel by kernel. Takes more memory. Not yet run on a GPU."""

    @property
    def graphs(self) -> bool:
        """Layers run as CUDA graphs."""
        return self.cuda_graph_impl != "none"

    def problems(self) -> list[str]:
        """What is wrong within this section alone."""
        return []


@dataclass(kw_only=True, slots=True, frozen=True)
class KernelSetting:
    """What decides whether a kernel can run."""

    cuda: bool
    transformer_engine: bool
    """Blocks are made of its modules."""
    dtype: Literal["fp32", "fp16", "bf16"]
    shape: GPTShape
    parallel: ParallelConfig
    megatron: frozenset[str] = frozenset()
    """Fields that model.megatron sets."""
    fp4: bool = False
    """Products are in fp4."""
    recomputes_shared_experts: bool = False
    deterministic: bool = False
    """train.deterministic_mode is set."""
    own_loss: bool = False
    """train.loss is set."""
    rope_restarts: bool = False
    """data.reset_position_ids is set without reset_attention_mask."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Fusion:
    """One of them."""

    title: str
    """In the line that says what is on."""
    transformer_engine: bool = True
    """Whether it needs Transformer Engine; each needs a GPU."""
    obstacle: Callable[[KernelSetting], str | None] = lambda _: None
    """Why this model cannot have it; None: it can."""


UNFUSED_ACTIVATIONS = {"activation_func_clamp_value", "glu_linear_offset", "use_te_activation_func"}


def _no_fused_activation(setting: KernelSetting) -> str | None:
    """Megatron has fused kernels for swiglu, and, in dense blocks, for geglu and for gelu with a bias."""
    shape = setting.shape
    if others := sorted(UNFUSED_ACTIVATIONS & setting.megatron):
        return f"model.megatron sets {others[0]}"
    if shape.activation == "quick_geglu":
        return None if shape.num_moe_experts and all(shape.moe_blocks) else "Megatron fuses quick_geglu in experts only"
    if shape.activation_func_clamp_value or shape.glu_linear_offset:
        return "Megatron's fused kernels clamp and add an offset with quick_geglu only"
    if shape.num_moe_experts:
        fits = shape.activation == "swiglu" and not shape.fc_bias
    else:
        fits = shape.gated or (shape.activation == "gelu" and shape.add_bias_linear)
    if fits:
        return None
    bias, where = "with" if shape.fc_bias else "without", " in experts" if shape.num_moe_experts else ""
    return f'Megatron has no fused kernel for model.activation "{shape.activation}" {bias} a bias{where}'


def _no_fused_rope(setting: KernelSetting) -> str | None:
    shape = setting.shape
    if shape.position_embedding_type != "rope":
        return f'model.position_embedding_type is "{shape.position_embedding_type}"'
    if setting.rope_restarts:
        return "positions restart with documents (data.reset_position_ids), and it knows one for all samples"
    if shape.multi_latent_attention:
        return None if shape.rope_scaling == "yarn" else "with latent attention Megatron's kernel is for YaRN only"
    if shape.rope_scaling in ("yarn", "longrope"):
        return "Transformer Engine's kernel does not scale as YaRN does"
    return None


def _no_fused_cross_entropy(setting: KernelSetting) -> str | None:
    if setting.deterministic:
        return "it is not deterministic, and train.deterministic_mode is set"
    if setting.own_loss:
        return "train.loss is made of what Transformer Engine's kernel does not return"
    if setting.dtype == "bf16":
        return None
    return f'precision.dtype is "{setting.dtype}", and only in bf16 does it save memory without rounding more'


def _no_main_gradient(setting: KernelSetting) -> str | None:
    if not setting.parallel.fully_sharded:
        return None
    return "gradients that go into shards have no buffer to be added to (parallel.data_parallel_sharding_strategy)"


def _no_experts(setting: KernelSetting) -> str | None:
    return None if setting.shape.num_moe_experts else "the model has no experts"


def _no_fused_permutation(setting: KernelSetting) -> str | None:
    if setting.shape.moe_pad_expert_input_to_capacity:
        return "Megatron sorts tokens into padded experts (model.moe_pad_expert_input_to_capacity) without it"
    return _no_experts(setting)


def _no_overlap(setting: KernelSetting) -> str | None:
    if not setting.shape.moe_shared_expert_intermediate_size:
        return "the model has no shared experts"
    if setting.parallel.moe_token_dispatcher_type == "allgather":
        return 'parallel.moe_token_dispatcher_type "allgather" has no place for it'
    if setting.recomputes_shared_experts:
        return 'train.recompute has "shared_experts"'
    if setting.parallel.expert_model_parallel_size == 1:
        return "no tokens travel with parallel.expert_model_parallel_size 1"
    return None


def _no_userbuffers(setting: KernelSetting) -> str | None:
    """Megatron has buffers for qkv, proj, fc1 and fc2; at another layer it drops the overlap of all that follow."""
    if not setting.parallel.sequence_parallel:
        return "it needs parallel.sequence_parallel"
    if setting.fp4:
        return "Transformer Engine 2.19 has no buffers for fp4"
    if setting.shape.multi_latent_attention or setting.shape.mtp_num_layers:
        return "it has no buffers for latent attention and multi-token prediction"
    return None


FUSIONS: dict[FusionName, Fusion] = {
    "bias_activation_fusion": Fusion(
        title="activation", transformer_engine=False, obstacle=_no_fused_activation
    ),
    "apply_rope_fusion": Fusion(title="rotary embedding", obstacle=_no_fused_rope),
    "cross_entropy_loss_fusion": Fusion(title="cross entropy", obstacle=_no_fused_cross_entropy),
    "gradient_accumulation_fusion": Fusion(title="gradient accumulation", obstacle=_no_main_gradient),
    "moe_grouped_gemm": Fusion(title="experts' products", obstacle=_no_experts),
    "moe_permute_fusion": Fusion(title="permutation of tokens", obstacle=_no_fused_permutation),
    "moe_router_fusion": Fusion(title="router", obstacle=_no_experts),
    "moe_shared_expert_overlap": Fusion(title="shared experts overlapped", obstacle=_no_overlap),
}  # fmt: skip
"""What runs where it can: tests/gpu_path/test_fusions.py compares each with ``off``."""


def obstacle(name: FusionName, setting: KernelSetting) -> str | None:
    """Why a fusion cannot run here; None: it can."""
    fusion = FUSIONS[name]
    return _missing(setting, fusion.transformer_engine) or fusion.obstacle(setting)


def _missing(setting: KernelSetting, transformer_engine: bool = True) -> str | None:
    if not setting.cuda:
        return "it needs a GPU"
    if transformer_engine and not setting.transformer_engine:
        return "it needs Transformer Engine, which is not installed here"
    return None


def kernel_problems(kernels: KernelsConfig, setting: KernelSetting) -> list[str]:
    """What is asked for where it cannot run."""
    problems = []
    if kernels.attention_backend != "auto" and (why := _missing(setting)):
        problems.append(f'kernels.attention_backend = "{kernels.attention_backend}" cannot run: {why}. Use "auto".')
    if kernels.tp_comm_overlap and (why := _missing(setting) or _no_userbuffers(setting)):
        problems.append(f"kernels.tp_comm_overlap cannot run: {why}. Leave it out.")
    if kernels.graphs and (why := _missing(setting, transformer_engine=False)):
        problems.append(f'kernels.cuda_graph_impl = "{kernels.cuda_graph_impl}" cannot run: {why}. Use "none".')
    return problems


def fusions_on(kernels: KernelsConfig, setting: KernelSetting) -> frozenset[str]:
    """The fields that are on; ``kernel_problems`` has found none."""
    on = frozenset(name for name in FUSIONS if name not in kernels.off and obstacle(name, setting) is None)
    asked = {"tp_comm_overlap": kernels.tp_comm_overlap, "cuda_graph_impl": kernels.graphs}
    return on | {name for name, wanted in asked.items() if wanted}


def described(fusions: frozenset[str]) -> str:
    """activation, rotary embedding."""
    titles: dict[str, str] = {name: fusion.title for name, fusion in FUSIONS.items()}
    titles |= {"tp_comm_overlap": "collectives of TP overlapped", "cuda_graph_impl": "layers as CUDA graphs"}
    return ", ".join(title for name, title in titles.items() if name in fusions)
