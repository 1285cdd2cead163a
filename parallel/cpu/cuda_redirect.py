"""``torch.cuda`` and device arguments redirected to the host, from a closed list of names.

Every function replaced here would raise on a host without CUDA, so no code that worked before behaves otherwise.
Called once by the launcher in a rank process; tools, tests and transformers keep a plain torch.
"""

import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any

import torch

CPU = torch.device("cpu")

FACTORIES = (
    "tensor zeros ones empty full arange rand randn randint randperm linspace eye empty_strided "
    "zeros_like ones_like empty_like full_like rand_like randn_like as_tensor"
).split()


class HostStream:
    """Stands for a CUDA stream where work is done in program order anyway."""

    priority = 0
    cuda_stream = 0
    device = CPU

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def wait_stream(self, *_: object) -> None:
        pass

    def wait_event(self, *_: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def record_event(self, event: "HostEvent | None" = None) -> "HostEvent":
        return event or HostEvent()

    def __enter__(self) -> "HostStream":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)


class HostEvent:
    """Stands for a CUDA event: a moment on the monotonic clock."""

    def __init__(self, *_: object, **__: object) -> None:
        self.at_s = 0.0

    def record(self, *_: object) -> None:
        self.at_s = time.perf_counter()

    def wait(self, *_: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: "HostEvent") -> float:
        """Milliseconds, as torch.cuda.Event does."""
        return (other.at_s - self.at_s) * 1e3


def _returns(value: Any) -> Callable[..., Any]:
    """A new function that ignores its arguments. New each time: Dynamo refuses one object under two names."""
    return lambda *_, **__: value


def cuda_names() -> dict[str, Any]:
    """The closed list: attribute of ``torch.cuda`` -> what stands for it on the host."""
    stream, generator = HostStream(), torch.default_generator
    nothing = "set_device synchronize empty_cache ipc_collect set_stream reset_peak_memory_stats _lazy_init".split()
    zero = "memory_allocated max_memory_allocated memory_reserved max_memory_reserved".split()
    return {
        **{name: _returns(None) for name in nothing},
        **{name: _returns(0) for name in zero},
        "is_available": _returns(False),
        "current_device": _returns(CPU),
        "device_count": _returns(1),
        "device": lambda _: contextlib.nullcontext(),
        "get_device_capability": _returns((0, 0)),
        "get_device_properties": _no_properties,
        "mem_get_info": _returns((0, 0)),
        "memory_stats": lambda *_: {},
        "Stream": HostStream,
        "Event": HostEvent,
        "current_stream": _returns(stream),
        "default_stream": _returns(stream),
        "stream": lambda _: contextlib.nullcontext(),
        "is_current_stream_capturing": _returns(False),
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "initial_seed": lambda: generator.initial_seed(),
        "manual_seed": lambda seed: generator.manual_seed(seed),
        "manual_seed_all": lambda seed: generator.manual_seed(seed),
        "default_generators": (generator,),
        "_lazy_call": lambda call, **_: call(),
    }


def install() -> None:
    """Redirect in this process. On a machine with GPUs they are hidden; RuntimeError where one is already in use."""
    if torch.cuda.is_initialized():
        raise RuntimeError("the CPU backend was asked for in a process that already uses CUDA")
    for name, value in cuda_names().items():
        setattr(torch.cuda, name, value)
    torch.cuda.random.get_rng_state, torch.cuda.random.set_rng_state = (
        torch.cuda.get_rng_state,
        torch.cuda.set_rng_state,
    )
    for name, value in (("range_push", _returns(None)), ("range_pop", _returns(None)), ("range", _no_range)):
        setattr(torch.cuda.nvtx, name, value)
    for name in FACTORIES:
        setattr(torch, name, _on_host(getattr(torch, name)))
    for owner, name in ((torch.Tensor, "cuda"), (torch.Tensor, "pin_memory"), (torch.nn.Module, "cuda")):
        setattr(owner, name, lambda self, *_, **__: self)
    for name, value in (
        ("record_stream", _returns(None)),
        ("to", _tensor_to(torch.Tensor.to)),
        ("type", _tensor_type(torch.Tensor.type)),
    ):
        setattr(torch.Tensor, name, value)


def _no_properties(*_: object, **__: object) -> None:
    """What torch's compiler takes for "no GPU" as it names its cache (torch/_inductor/codecache.py, get_system)."""
    raise RuntimeError("this process runs on the CPU: no CUDA device has properties here")


def _no_range(*_: object, **__: object) -> contextlib.nullcontext[None]:
    return contextlib.nullcontext()


def _is_cuda(device: object) -> bool:
    if isinstance(device, bool):
        return False
    if isinstance(device, int):  # a bare device index
        return True
    return (isinstance(device, torch.device) and device.type == "cuda") or (
        isinstance(device, str) and device.startswith("cuda")
    )


def _on_host(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = CPU
            kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return call


def _tensor_to(to: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(to)
    def call(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and _is_cuda(args[0]):
            args = (CPU, *args[1:])
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return to(self, *args, **kwargs)

    return call


def _tensor_type(type_of: Callable[..., Any]) -> Callable[..., Any]:
    """mcore tells parameters apart by names such as "torch.cuda.FloatTensor" (optimizer.py, distrib_optimizer.py)."""

    @functools.wraps(type_of)
    def call(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return type_of(self).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        return type_of(self, dtype, *args, **kwargs)

    return call
