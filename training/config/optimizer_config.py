"""The ``optimizer`` section: AdamW, Muon, their schedules, and where and how their state is kept."""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from parallel.config import ParallelConfig, PrecisionConfig
from parallel.megatron_fields import megatron_field_problems, parse
from program.limits import too_small
from training.config.import_path import form_problems
from training.config.lr_schedule import DecayStyle, WeightDecayStyle, WSDDecayStyle

StateDtype = Literal["fp32", "bf16", "fp16", "fp8"]

OVERLAP = "overlap_cpu_optimizer_d2h_h2d"
STATE_FIELDS = ("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype")
OWNED_OPTIMIZER_FIELDS = frozenset({
    "optimizer", "lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad", "bf16",
    "fp16", "params_dtype", "loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window",
    "hysteresis", "use_distributed_optimizer", "overlap_param_gather", "reuse_grad_buf_for_mxfp8_param_ag",
    "use_precision_aware_optimizer", "main_params_dtype", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype",
    "store_param_remainders", "optimizer_cpu_offload", "optimizer_offload_fraction", "muon_momentum", "muon_nesterov",
    "muon_num_ns_steps", "muon_coefficient_type", "muon_scale_mode", "muon_extra_scale_factor", "muon_split_qkv",
    "muon_fp32_matmul_prec", "muon_tp_mode", "muon_scalar_optimizer",
    "decoupled_lr", "decoupled_min_lr",
})  # fmt: skip


@dataclass(kw_only=True, slots=True, frozen=True)
class OptimizerConfig:
    """The optimizer and its schedules."""

    optimizer: str = "adam"
    """adam (AdamW); muon (arXiv:2502.16982) for matrices, AdamW for embeddings of words, output layer, norms and
    biases; or your own: the import path "module:class" of a torch.optim.Optimizer, which is made as class(params,
    lr=..., weight_decay=...). The fields adam_* are then not read."""

    lr: float = 3e-4
    """Largest learning rate."""

    min_lr: float = 0.0
    """Learning rate at and after the end of the decay."""

    lr_decay_style: DecayStyle = "cosine"
    """How the learning rate falls after the warm-up. WSD: warm-up, stable, decay. power: as (1 - progress) ^
    lr_decay_power. minus-square-root: as 1 - sqrt(progress)."""

    lr_decay_power: float = 1.0
    """Of "power". 1: linear; 2: quadratic."""

    decoupled_lr: float | None = None
    """Largest learning rate of word embeddings and output layer, which follow a curve of their own. None: lr."""

    decoupled_min_lr: float | None = None
    """Their learning rate at the end of the decay. None: min_lr."""

    lr_warmup_iters: int = 0
    """Iterations of linear warm-up."""

    lr_warmup_samples: int = 0
    """The same in samples, as Megatron-LM counts with --train-samples: another batch does not change it."""

    lr_warmup_fraction: float | None = None
    """The same as a share of the whole decay, from 0 to 1."""

    lr_warmup_init: float = 0.0
    """Learning rate at the start of the warm-up."""

    lr_decay_iters: int | None = None
    """Iterations, warm-up included, until min_lr is reached. None: train.train_iters."""

    lr_decay_samples: int | None = None
    """The same in samples."""

    lr_wsd_decay_iters: int | None = None
    """Iterations of the final decay of WSD. None: a fifth of the whole."""

    lr_wsd_decay_samples: int | None = None
    """The same in samples."""

    lr_wsd_decay_style: WSDDecayStyle = "exponential"
    """Form of WSD's final decay."""

    weight_decay: float = 0.1
    """Decoupled weight decay (arXiv:1711.05101), on matrices only."""

    start_weight_decay: float | None = None
    """Weight decay at the first iteration of a ramp. None: weight_decay."""

    end_weight_decay: float | None = None
    """Weight decay at the end of a ramp. None: weight_decay."""

    weight_decay_incr_style: WeightDecayStyle = "constant"
    """Form of the ramp from start_weight_decay to end_weight_decay."""

    weight_decay_incr_samples: int | None = None
    """Samples of that ramp, which Megatron-LM takes from --train-samples. None: those of train.train_iters."""

    adam_beta1: float = 0.9
    """Decay rate of the first moment."""

    adam_beta2: float = 0.95
    """Decay rate of the second moment."""

    adam_eps: float = 1e-8
    """Added to the root of the second moment."""

    muon_momentum: float = 0.95
    """Decay rate of Muon's momentum."""

    muon_nesterov: bool = False
    """Orthogonalize what Nesterov's momentum looks ahead to."""

    muon_num_ns_steps: int = 5
    """Newton-Schulz iterations of a step."""

    muon_coefficient_type: Literal["simple", "quintic", "polar_express", "cans", "aol", "deepseekv4"] = "quintic"
    """Coefficients of its polynomials, by their names in emerging-optimizers."""

    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = "spectral"
    """Of an update [out, in]: sqrt(max(out, in)), sqrt(out / in), or sqrt(max(1, out / in))."""

    muon_extra_scale_factor: float = 1.0
    """Of every update of Muon's; 0.2 gives it the size of AdamW's (arXiv:2502.16982)."""

    muon_split_qkv: bool = True
    """Orthogonalize Q, K and V of a fused projection apart."""

    muon_split_fused: bool = False
    """The same for gate and up projection of a gated MLP, and the parts of a mixer's input projection."""

    muon_fp32_matmul_prec: Literal["highest", "high", "medium"] = "medium"
    """Of Newton-Schulz's products: fp32, TF32, bf16."""

    qk_clip: bool = False
    """After an update, scale down the queries' and keys' weights of heads whose largest attention logit in the global
    batch was above qk_clip_threshold (QK-clip, arXiv:2507.20534), and log that logit. With every optimizer."""

    qk_clip_threshold: float = 100.0
    """Logit that larger ones are scaled down to, on that batch with the weights before the update."""

    qk_clip_alpha: float = 0.5
    """Share of the scaling that queries take, as an exponent; keys have the rest. 0 to 1."""

    clip_grad: float = 1.0
    """Largest global gradient norm; 0 switches clipping off."""

    use_precision_aware_optimizer: bool = False
    """Transformer Engine's FusedAdam holds the fp32 weights, as the 16 bits that bf16 weights lack (2 bytes instead of
    4; an update is the same bit for bit), and moments in exp_avg_dtype and exp_avg_sq_dtype. Needs a GPU, bf16 or fp16,
    and ZeRO-1."""

    exp_avg_dtype: StateDtype = "fp32"
    """Of the first moment between updates, which compute in fp32. fp16 and fp8 (e4m3) with a scale for each shard of a
    parameter. Needs use_precision_aware_optimizer, as do the next two."""

    exp_avg_sq_dtype: StateDtype = "fp32"
    """Of the second moment, as exp_avg_dtype."""

    main_params_dtype: Literal["fp32", "fp16"] = "fp32"
    """Of the weights that updates are added to; fp16 with a scale for each shard of a parameter."""

    optimizer_cpu_offload: bool = False
    """Main weights and moments in the host's memory, updated by its cores (megatron-core's HybridDeviceOptimizer): 12
    bytes less for each parameter that a GPU updates, 4 bytes each way over PCIe in a step. With ZeRO-2 and ZeRO-3,
    shards of weights and gradients too (torch's CPUOffloadPolicy): 4 bytes of each parameter for each gather and each
    reduction. Needs a GPU, and one of these."""

    optimizer_offload_fraction: float = 1.0
    """Of the elements of each rank's shard: the share that is offloaded, the first parameters. Only with ZeRO-1."""

    megatron: tuple[str, ...] = ()
    """More of mcore's OptimizerConfig, as "field=value" strings. "overlap_cpu_optimizer_d2h_h2d=True", with
    optimizer_cpu_offload and ZeRO-1: copies run while the host updates."""

    def plain_state(self) -> "OptimizerConfig":
        """With the state in fp32, beside the weights, as every device can keep it."""
        return replace(
            self, optimizer_cpu_offload=False, use_precision_aware_optimizer=False,
            exp_avg_dtype="fp32", exp_avg_sq_dtype="fp32", main_params_dtype="fp32",
        )  # fmt: skip

    def on_the_host(self) -> "OptimizerConfig":
        """With all of the state in the host's memory, where Adam keeps fp32."""
        return replace(self.plain_state(), optimizer_cpu_offload=True, optimizer_offload_fraction=1.0)

    def _kind_problems(self) -> list[str]:
        if self.optimizer == "adam":
            return []
        if self.optimizer != "muon":
            return form_problems("optimizer.optimizer", self.optimizer, '"adam", "muon" or ')
        found = []
        if importlib.util.find_spec("emerging_optimizers") is None:
            found.append('optimizer.optimizer "muon" needs emerging-optimizers: pip install -e ".[muon]".')
        if not 0 <= self.muon_momentum < 1:
            found.append(f"optimizer.muon_momentum must be in [0, 1), found {self.muon_momentum}.")
        if "grad_norm_skip_threshold" in parse(self.megatron):  # a rank without a shard would step alone, and wait
            found.append('optimizer.optimizer "muon" cannot be with grad_norm_skip_threshold in optimizer.megatron.')
        found += too_small(self, "optimizer.", 1, "muon_num_ns_steps")
        return found + too_small(self, "optimizer.", None, "muon_extra_scale_factor")

    def problems(self) -> list[str]:
        """What is wrong within this section alone."""
        found = self._kind_problems()
        if self.lr <= 0 or not 0 <= self.min_lr <= self.lr:
            found.append(f"optimizer: expected 0 <= min_lr <= lr and lr > 0, found min_lr {self.min_lr}, lr {self.lr}.")
        found += self._decoupled_problems()
        found += too_small(self, "optimizer.", None, "lr_decay_power", "adam_eps")
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                found.append(f"optimizer.{name} must be in [0, 1), found {getattr(self, name)}.")
        for name in (
            "lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction", "lr_warmup_init", "lr_wsd_decay_iters",
            "lr_wsd_decay_samples", "weight_decay_incr_samples", "clip_grad", "weight_decay", "start_weight_decay",
            "end_weight_decay",
        ):  # fmt: skip
            if (getattr(self, name) or 0) < 0:
                found.append(f"optimizer.{name} must not be negative, found {getattr(self, name)}.")
        found += too_small(self, "optimizer.", 1, "lr_decay_iters", "lr_decay_samples")
        found += self._unit_problems()
        if self.qk_clip and (self.qk_clip_threshold <= 0 or not 0 <= self.qk_clip_alpha <= 1):
            found.append(
                "optimizer: expected qk_clip_threshold > 0 and 0 <= qk_clip_alpha <= 1, found "
                f"{self.qk_clip_threshold:g} and {self.qk_clip_alpha:g}."
            )
        if self.weight_decay_incr_style != "constant" and None in (self.start_weight_decay, self.end_weight_decay):
            found.append("optimizer.weight_decay_incr_style needs start_weight_decay and end_weight_decay.")
        if not 0 < self.optimizer_offload_fraction <= 1:
            found.append(
                f"optimizer.optimizer_offload_fraction must be in (0, 1], found {self.optimizer_offload_fraction}. To "
                "offload nothing, set optimizer.optimizer_cpu_offload = false."
            )
        return found + megatron_field_problems("optimizer.megatron", self.megatron, OWNED_OPTIMIZER_FIELDS)

    def _decoupled_problems(self) -> list[str]:
        if self.decoupled_lr is None:
            needed = "optimizer.decoupled_min_lr needs optimizer.decoupled_lr beside it, found none."
            return [needed] if self.decoupled_min_lr is not None else []
        least = self.min_lr if self.decoupled_min_lr is None else self.decoupled_min_lr
        if self.decoupled_lr > 0 and 0 <= least <= self.decoupled_lr:
            return []
        return [
            "optimizer: expected 0 <= decoupled_min_lr (else min_lr) <= decoupled_lr and decoupled_lr > 0, found "
            f"{least:g} and {self.decoupled_lr:g}."
        ]

    def _unit_problems(self) -> list[str]:
        """Lengths that are given twice, in different units."""
        given = {
            name: value
            for name in ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction", "lr_decay_iters",
                         "lr_decay_samples", "lr_wsd_decay_iters", "lr_wsd_decay_samples")
            if (value := getattr(self, name)) not in (None, 0) or (value == 0 and name == "lr_warmup_fraction")
        }  # fmt: skip
        found = []
        for length in ("lr_warmup_", "lr_decay_", "lr_wsd_decay_"):
            several = [f"{name} {value}" for name, value in given.items() if name.startswith(length)]
            if len(several) > 1:
                found.append(f"optimizer: can only specify one of {' and '.join(several)}. Leave one out.")
        if "lr_decay_samples" in given and "lr_wsd_decay_iters" in given:
            found.append(
                "optimizer.lr_wsd_decay_iters ends with lr_decay_iters, and lr_decay_samples is given: set "
                "lr_wsd_decay_samples instead."
            )
        return found


def state_problems(
    optimizer: OptimizerConfig, parallel: ParallelConfig, precision: PrecisionConfig, cuda: bool
) -> list[str]:
    """What the fields about the optimizer's state cannot be with. cuda: the run may have a GPU."""
    return [
        *(_beside_muon(optimizer, parallel, precision) if optimizer.optimizer == "muon" else []),
        *_low_precision_problems(optimizer, parallel, precision, cuda),
        *_offload_problems(optimizer, parallel, precision, cuda),
    ]


def _beside_muon(optimizer: OptimizerConfig, parallel: ParallelConfig, precision: PrecisionConfig) -> Iterator[str]:
    if precision.dtype == "fp16":
        yield 'optimizer.optimizer "muon" cannot be with precision.dtype = "fp16". Use "bf16".'
    if optimizer.optimizer_cpu_offload and parallel.fully_sharded:  # with ZeRO-1, it is refused for all but AdamW
        yield (
            'optimizer.optimizer "muon" cannot be with optimizer.optimizer_cpu_offload: the host updates by AdamW '
            "alone. Set it to false."
        )


def _low_precision_problems(
    optimizer: OptimizerConfig, parallel: ParallelConfig, precision: PrecisionConfig, cuda: bool
) -> Iterator[str]:
    low = [f'optimizer.{name} "{dtype}"' for name in STATE_FIELDS if (dtype := getattr(optimizer, name)) != "fp32"]
    if not optimizer.use_precision_aware_optimizer:
        yield from (
            f'{field} needs optimizer.use_precision_aware_optimizer = true. Set it, or use "fp32".' for field in low
        )
        return
    field = "optimizer.use_precision_aware_optimizer"
    if not cuda:
        yield f"{field}: Transformer Engine's FusedAdam needs a GPU, and a CPU has none. Set it to false."
    yield from _common_problems(field, optimizer, parallel)
    if precision.dtype == "fp32":
        yield f'{field}: weights in fp32 are their own main weights. Set it to false, or precision.dtype = "bf16".'
    if precision.fp8_param_gather:
        yield f"{field} cannot be with precision.fp8_param_gather, with which it was not compared. Set one to false."
    if optimizer.optimizer_cpu_offload and low:
        yield f"{low[0]} cannot be with optimizer.optimizer_cpu_offload: the host's Adam keeps fp32. Set one of them."


def _offload_problems(
    optimizer: OptimizerConfig, parallel: ParallelConfig, precision: PrecisionConfig, cuda: bool
) -> Iterator[str]:
    field = "optimizer.optimizer_cpu_offload"
    if not optimizer.optimizer_cpu_offload:
        return
    if not cuda:
        yield f"{field}: on a CPU the optimizer's state is in the host's memory already. Set it to false."
    if parallel.fully_sharded:
        of_zero1 = {
            "optimizer_offload_fraction": optimizer.optimizer_offload_fraction < 1,
            f"megatron: {OVERLAP}": bool(parse(optimizer.megatron).get(OVERLAP)),
        }
        yield from (
            f'optimizer.{name} needs ZeRO-1, found "{parallel.data_parallel_sharding_strategy}", with which all shards '
            "are offloaded. Leave it out."
            for name, there in of_zero1.items()
            if there
        )
        return
    yield from _common_problems(field, optimizer, parallel, "ZeRO-1, -2 or -3")
    if precision.fp8_param_gather:
        yield f"{field} cannot be with precision.fp8_param_gather: the host has no fp8. Set one of them to false."


def _common_problems(
    field: str, optimizer: OptimizerConfig, parallel: ParallelConfig, needed: str = "ZeRO-1"
) -> Iterator[str]:
    if optimizer.optimizer != "adam":
        yield f'{field} needs optimizer.optimizer = "adam", found "{optimizer.optimizer}". Set one of them.'
    if parallel.sharding != "optim":
        yield (
            f"{field} needs {needed} (such as parallel.use_distributed_optimizer = true), "
            f'found "{parallel.sharding}". Set it to false, or use {needed}.'
        )
