"""The MLP's activations. To add one: its name, its function and its entry here."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

ActivationName = Literal["swiglu", "geglu", "quick_geglu", "gelu", "gelu_exact", "squared_relu", "xielu"]
ActivationFunction = Callable[["Tensor"], "Tensor"]


@dataclass(kw_only=True, slots=True, frozen=True)
class Activation:
    """One of them. Torch is imported by ``function`` alone: shapes are read without it."""

    function: Callable[[], ActivationFunction]
    """Gives the element-wise function; of a gated one, that of the gate."""
    gated: bool = False
    """The MLP multiplies two projections (arXiv:2002.05202): fc1 has 2f rows, the gate's f first."""
    fused: Callable[[], ActivationFunction] | None = None
    """Gives the function by which mcore recognises that its fused kernels compute this activation. None: they do not,
    or ``function`` is that."""
    learned: tuple[str, ...] = ()
    """Names of its parameters, one number each in every MLP; its module is in models/layers/activation.py."""


def _silu() -> ActivationFunction:
    from torch.nn import functional

    return functional.silu  # itself: mcore compares, and then fuses it with the gate's product


def _gelu() -> ActivationFunction:
    from torch.nn import functional

    return partial(functional.gelu, approximate="tanh")


def _gelu_exact() -> ActivationFunction:
    from torch.nn import functional

    return partial(functional.gelu, approximate="none")  # not functional.gelu itself, which mcore fuses as tanh


def _any_gelu() -> ActivationFunction:
    from torch.nn import functional

    return functional.gelu  # mcore's fused kernels have the tanh approximation all the same


def _not_without_parameters() -> ActivationFunction:
    def refuse(_: "Tensor") -> "Tensor":
        raise TypeError("an activation with parameters is a module (models/layers/activation.py)")

    return refuse


def _quick_gelu() -> ActivationFunction:
    return lambda x: x * (1.702 * x).sigmoid()


def _any_quick_gelu() -> ActivationFunction:
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    return quick_gelu


def _squared_relu() -> ActivationFunction:
    from torch.nn import functional

    return lambda x: functional.relu(x).square()


ACTIVATIONS: dict[str, Activation] = {
    "swiglu": Activation(function=_silu, gated=True),
    "geglu": Activation(function=_gelu, gated=True, fused=_any_gelu),
    "quick_geglu": Activation(function=_quick_gelu, gated=True, fused=_any_quick_gelu),
    "gelu": Activation(function=_gelu, fused=_any_gelu),
    "gelu_exact": Activation(function=_gelu_exact),
    "squared_relu": Activation(function=_squared_relu),
    "xielu": Activation(function=_not_without_parameters, learned=("alpha_p", "alpha_n")),
}
"""By their name in ``model.activation``."""
