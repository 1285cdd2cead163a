"""How an optimizer of megatron-core's keeps its fp32 weights and moments: as they are, in fewer bits, or on the host.

    StateForm   fp32 tensors beside the model's 16 bits, or the fp32 weights themselves
    InFewerBits Transformer Engine's FusedAdam (optimizer.use_precision_aware_optimizer): moments in bf16, fp16 or fp8;
                of fp32 weights the 16 bits that bf16 lacks, or fp16 ones with a scale
    OnTheHost   megatron-core's HybridDeviceOptimizer (optimizer.optimizer_cpu_offload): fp32 in the host's memory

A checkpoint has the same keys and shapes of each, in fp32, and reads what any of them wrote. So does loading weights
alone, after which megatron-core 0.19.2 lets FusedAdam keep the fp32 weights that it had before.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor

from models.layers.fp8_weights import kept_in_fp8

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Of AdamW."""


class StateForm:
    """Of one of the optimizers that megatron-core chains; this one: fp32 tensors that it updates in place."""

    def __init__(self, part: Any) -> None:
        self.part = part

    def prepare(self) -> None:
        """What the optimizer needs before its first step."""

    def allocate(self) -> None:
        """Give every parameter its moments, zeros, where no update has made them yet."""
        self.part.init_state_fn(self.part.optimizer, self.part.config)

    def tensors(self, main: Tensor) -> dict[str, Tensor]:
        """``param`` and moments of a parameter of the inner optimizer's, flat: what is kept, or copies of it in fp32
        where ``copied`` has the name."""
        return _flat(self.part.optimizer.state[main]) | {"param": self.weight(main)}

    def weight(self, main: Tensor) -> Tensor:
        """``param`` of ``tensors``."""
        return main.detach().view(-1)

    def copied(self, main: Tensor) -> frozenset[str]:
        """Names of what is not kept as fp32."""
        return frozenset()

    def store(self, main: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Keep these of ``copied``, fp32 on any device."""

    def weights_out(self) -> None:
        """Round the fp32 weights into the model's, this rank's shard of them."""
        if self.part.config.reuse_grad_buf_for_mxfp8_param_ag:
            self.part._copy_main_params_to_param_buffer()
        elif hasattr(self.part, "_copy_main_params_to_model_params"):
            self.part._copy_main_params_to_model_params()

    def weights_in(self) -> None:
        """Start the fp32 weights from the model's."""
        self.part.reload_model_params()

    def counters(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers that count steps."""
        return [self.part.optimizer]


def form_of(part: Any) -> StateForm:
    """part: a MegatronOptimizer that is no chain, and has parameters."""
    if isinstance(part.optimizer, HybridDeviceOptimizer):
        return OnTheHost(part)
    return InFewerBits(part) if part.config.use_precision_aware_optimizer else StateForm(part)


class InFewerBits(StateForm):
    """Transformer Engine's FusedAdam, whose parameters are the model's own shards."""

    def __init__(self, part: Any) -> None:
        super().__init__(part)
        self.adam = part.optimizer

    def prepare(self) -> None:
        """FusedAdam's own first step would keep a transposed copy of moments in fp8."""
        self.allocate()

    def allocate(self) -> None:
        for main in _params(self.adam):
            if not self.adam.state[main]:  # megatron-core 0.19.2 leaves the second argument out
                self.adam.initialize_state(main, self._as_remainders(main))
                for moment in self.adam.state[main].values():
                    if kept_in_fp8(moment):  # no product will need it: 1 byte of 2 on Hopper
                        moment._quantizer.set_usage(columnwise=False)
                        moment.update_usage(columnwise_usage=False)

    def tensors(self, main: Tensor) -> dict[str, Tensor]:
        found = {name: self.adam.get_unscaled_state(main, name) for name in MOMENTS}
        return _flat(found) | {"param": self.weight(main)}

    def weight(self, main: Tensor) -> Tensor:
        if main.dtype == torch.float32:  # FusedAdam updates it, and not the copy that it has made of it
            return super().weight(main)
        if self._as_remainders(main):
            return joined(main, self.adam.state[main]["master_param"]).view(-1)
        unscaled: Tensor = self.adam.get_unscaled_state(main, "master_param")
        return unscaled.view(-1)

    def copied(self, main: Tensor) -> frozenset[str]:
        dtypes = self.adam.name_to_dtype_map
        names = {name for name in MOMENTS if dtypes[name] != torch.float32}
        whole = self._as_remainders(main) or dtypes["master_param"] != torch.float32
        return frozenset(names | {"param"} if whole and main.dtype != torch.float32 else names)

    def store(self, main: Tensor, tensors: Mapping[str, Tensor]) -> None:
        for name in self.copied(main):
            values = tensors[name].to(main.device)
            if name != "param":
                self.adam.set_scaled_state(main, name, values)
            elif self._as_remainders(main):
                split(values, main, self.adam.state[main]["master_param"])
            else:
                self.adam.set_scaled_state(main, "master_param", values)

    def weights_out(self) -> None:
        for main in _params(self.adam):
            if not self._is_whole(main):  # remainders stand beside the bf16 that they complete
                main.copy_(self.adam.get_unscaled_state(main, "master_param"))

    def weights_in(self) -> None:
        for main in _params(self.adam):
            if self._as_remainders(main):
                self.adam.state[main]["master_param"].zero_()
            else:
                self.adam.set_scaled_state(main, "master_param", main.float())

    def _is_whole(self, main: Tensor) -> bool:
        """The model's own shard has every bit of the fp32 weights, alone or with remainders."""
        return main.dtype == torch.float32 or self._as_remainders(main)

    def _as_remainders(self, main: Tensor) -> bool:
        return bool(self.adam.store_param_remainders) and main.dtype == torch.bfloat16


class OnTheHost(StateForm):
    """megatron-core's HybridDeviceOptimizer: AdamW on the host for the first parameters, FusedAdam for the others."""

    def __init__(self, part: Any) -> None:
        super().__init__(part)
        self.hybrid = part.optimizer

    def prepare(self) -> None:
        """Let what is not offloaded be updated with gradients that are there.

        megatron-core 0.19.2 casts them in the stream that copies gradients to the host, and updates in the current one
        without a wait; and leaves those of fp32 weights where FusedAdam does not look.
        """
        if self.hybrid.gpu_optimizer is not None:
            self.hybrid.gpu_optimizer.register_step_pre_hook(self._find_gradients)

    def allocate(self) -> None:
        for own in self.hybrid.sub_optimizers:
            for group in own.param_groups:
                for param in group["params"]:
                    if not own.state[param]:
                        own.state[param] = {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
                        if own in self.hybrid.cpu_optimizers:
                            own.state[param]["step"] = torch.zeros((), dtype=torch.float32)
        self.hybrid._sync_sub_optimizers_state_to_hdo()

    def tensors(self, main: Tensor) -> dict[str, Tensor]:
        return _flat(self.hybrid.state[main]) | {"param": self.weight(main)}

    def weight(self, main: Tensor) -> Tensor:
        inner: Tensor = self.hybrid.param_to_inner_param[main]
        return inner.detach().view(-1)

    def weights_out(self) -> None:
        for main, inner in self.hybrid.param_to_inner_param.items():
            if inner is not main:
                main.detach().copy_(inner)

    def weights_in(self) -> None:
        for main, inner in self.hybrid.param_to_inner_param.items():
            if inner is not main:
                inner.detach().copy_(main)

    def counters(self) -> Sequence[torch.optim.Optimizer]:
        found: Sequence[torch.optim.Optimizer] = self.hybrid.sub_optimizers
        return found

    def _find_gradients(self, own: torch.optim.Optimizer, *_: Any) -> None:
        torch.cuda.current_stream().wait_stream(self.hybrid._d2h_stream)
        for param in _params(own):
            if self.hybrid.param_to_inner_param.get(param) is param:
                param.grad = getattr(param, "decoupled_grad", None)


def joined(rounded: Tensor, remainders: Tensor) -> Tensor:
    """fp32 [n] of what Transformer Engine keeps of it: bf16 [n], and the lower half of its bits, int16 [n].

    Its kernel rounds to bf16 by the highest of the lower bits, and so takes 1 off again where that is set
    (multi_tensor/adam.cu of Transformer Engine 2.19, AdamFunctorMasterParamRemainder).
    """
    upper = rounded.detach().view(torch.int16).int() - (remainders < 0).int()
    return ((upper << 16) | (remainders.int() & 0xFFFF)).view(torch.float32)


def split(values: Tensor, rounded: Tensor, remainders: Tensor) -> None:
    """Inverse of ``joined``, into both."""
    bits = values.view(torch.int32)
    lower = ((bits & 0xFFFF) ^ 0x8000) - 0x8000
    remainders.copy_(lower)
    rounded.detach().view(torch.int16).copy_((bits >> 16) + (lower < 0).int())


def _params(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _flat(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: one.detach().view(-1) for name, one in state.items() if isinstance(one, Tensor) and one.ndim}
