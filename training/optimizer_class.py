"""``optimizer.optimizer = "module:class"``: a torch optimizer of the user's instead of AdamW.

megatron-core gives it fp32 parameters: this rank's shards as flat tensors with ZeRO-1, rows of them with ZeRO-2 and -3,
whole ones without. A checkpoint cuts its state as it does the parameter, and a resume fills it in before the first
step. So a state is tensors of the parameter's shape that begin as zeros, and a count of steps. Whether a class keeps to
that is tried out on a few numbers, by what a run would do with it.
"""

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallel.config import ParallelConfig
from program.errors import SharedMistake
from program.users_code import named, users_code
from training.config.import_path import accepts, load, raised
from training.config.optimizer_config import OptimizerConfig

FIELD = "optimizer.optimizer"
STEPS = 3
"""That are tried: one that makes the state, one that uses it, one after a resume."""


@dataclass(kw_only=True, slots=True, frozen=True)
class OptimizerClass:
    """A class, and what it keeps of each parameter."""

    path: str
    kind: type[torch.optim.Optimizer]
    tensors: tuple[str, ...]
    """Names in ``optimizer.state[param]`` of fp32 tensors of the parameter's shape."""
    step: Tensor | int | float | None
    """``optimizer.state[param]["step"]`` before the first step; None where it has none."""

    def make(self, params: Any, lr: float, weight_decay: float, **_: object) -> torch.optim.Optimizer:
        """As the user's module documents its class; what else Adam would be given is not for it."""
        what = f"your optimizer {self.path} ({FIELD})"
        with users_code(f"__init__ of {what}"):
            made = self.kind(params, lr=lr, weight_decay=weight_decay)  # type: ignore[call-arg]
        made.step = named(f"step of {what}", made.step)  # type: ignore[method-assign, assignment]
        return made

    def allocate(self, optimizer: torch.optim.Optimizer, _config: object = None) -> None:
        """Give every parameter the state that its first step would begin with, where it has none: what megatron-core
        calls init_state_fn."""
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            state = optimizer.state[param]
            for name in self.tensors:
                if name not in state:
                    state[name] = torch.zeros_like(param, dtype=torch.float32)
            if self.step is not None and "step" not in state:
                state["step"] = self.step.clone() if isinstance(self.step, Tensor) else self.step


def load_class(path: str) -> type[torch.optim.Optimizer] | None:
    """The class of an import path; None of "adam" and "muon". Raises SharedMistake for what is not an optimizer."""
    if path in ("adam", "muon"):
        return None
    kind = load(FIELD, path)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        found = f"class {kind.__name__}" if isinstance(kind, type) else type(kind).__name__
        raise SharedMistake(f'{FIELD} "{path}": expected a subclass of torch.optim.Optimizer, found {found}.')
    if not accepts(kind, 1, lr=1.0, weight_decay=0.0):
        raise SharedMistake(
            f'{FIELD} "{path}": expected {kind.__name__}(params, lr, weight_decay), found '
            f"{kind.__name__}{inspect.signature(kind)}."
        )
    return kind


def try_out(config: OptimizerConfig, parallel: ParallelConfig, device: torch.device | str) -> OptimizerClass | None:
    """What the class keeps; None of "adam". Raises SharedMistake where a run with it would fail, or resume otherwise.

    Computes a little on ``device``; the random numbers of the run are as before.
    """
    kind = load_class(config.optimizer)
    if kind is None:
        return None
    where = f'{FIELD} "{config.optimizer}"'
    gpus = [torch.device(device)] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(gpus), torch.no_grad():
        try:
            with users_code(f"your optimizer {config.optimizer} ({FIELD})"):
                found = _described(config.optimizer, kind, device, where)
                _check_resume(found, device, where)
                _check_learning_rate(found, device, where)
                _check_parts(found, parallel, device, where)
        except SharedMistake:
            raise
        except Exception as error:
            raise SharedMistake(f"{where}: {raised(error)}") from error
    return found


def _check_parts(found: OptimizerClass, parallel: ParallelConfig, device: torch.device | str, where: str) -> None:
    """Each rank updates what it holds by itself: its stage's parameters, or halves of a matrix."""
    whole = _stepped(found, device, ("matrix", "vector"))
    if not torch.allclose(whole, _stepped(found, device, ("matrix",), ("vector",)), rtol=1e-6, atol=1e-7):
        raise SharedMistake(
            f"{where}: its update of a parameter depends on others, which may be on other ranks: it would change with "
            "the layout. Update each parameter by itself; optimizer.clip_grad clips the norm of the whole model."
        )
    if torch.allclose(whole, _stepped(found, device, ("first",), ("second", "vector")), rtol=1e-6, atol=1e-7):
        return
    shards = parallel.sharding != "no_shard"
    cut = parallel.tensor_model_parallel_size > 1 or (parallel.expert_tensor_parallel_size or 1) > 1
    if shards or cut:
        fix = "parallel.use_distributed_optimizer = false" if shards else "parallel.tensor_model_parallel_size = 1"
        raise SharedMistake(
            f"{where}: its update of a matrix is another one when the matrix is cut in two, as "
            f"{'the distributed optimizer (ZeRO)' if shards else 'tensor parallelism'} cuts it over ranks. Set {fix}, "
            "or use an optimizer that updates each element by itself."
        )


def _stepped(found: OptimizerClass, device: torch.device | str, *ranks: tuple[str, ...]) -> Tensor:
    """Matrix and vector after ``STEPS``, from ranks that hold these of them."""
    toys = [_Toy(found.kind, device, held) for held in ranks]
    for toy in toys:
        toy.step(*range(STEPS))
    return torch.cat([toy.values() for toy in toys])


class _Toy:
    """A matrix and a vector, the same each time, with gradients, and an optimizer for them.

    held: which of them; "first" and "second" are halves of the matrix, each flat, as two ranks hold shards.
    """

    def __init__(
        self,
        kind: type[torch.optim.Optimizer],
        device: torch.device | str,
        held: Sequence[str] = ("matrix", "vector"),
    ) -> None:
        random = torch.Generator().manual_seed(1)
        matrices = torch.randn(STEPS + 1, 4, 6, generator=random)
        first, second = matrices.view(STEPS + 1, -1).chunk(2, dim=1)
        vectors = torch.randn(STEPS + 1, 3, generator=random)
        there = {"matrix": matrices, "first": first, "second": second, "vector": vectors}
        self.params = [torch.nn.Parameter(there[name][0].to(device)) for name in held]
        self.gradients = [[there[name][step + 1].to(device) for name in held] for step in range(STEPS)]
        groups = [{"params": [param]} for param in self.params]
        self.optimizer = kind(groups, lr=0.1, weight_decay=0.01)  # type: ignore[call-arg]

    def step(self, *numbers: int) -> None:
        for number in numbers:
            for param, gradient in zip(self.params, self.gradients[number], strict=True):
                param.grad = gradient.clone()
            self.optimizer.step()

    def values(self) -> Tensor:
        return torch.cat([param.detach().view(-1) for param in self.params])


def _described(path: str, kind: type[torch.optim.Optimizer], device: torch.device | str, where: str) -> OptimizerClass:
    toy = _Toy(kind, device)
    if toy.optimizer.state:
        raise SharedMistake(
            f"{where}: __init__ makes state, but parameters become fp32 shards after it. Make it in step(), where a "
            "parameter has none."
        )
    toy.step(0)
    states = [toy.optimizer.state.get(param, {}) for param in toy.params]
    names = sorted({name for state in states for name in state} - {"step"})
    for param, state in zip(toy.params, states, strict=True):
        for name in names:
            _check_tensor(name, state.get(name), param, where)
    step = states[0].get("step")
    if step is not None and (not isinstance(step, int | float | Tensor) or (isinstance(step, Tensor) and step.ndim)):
        raise SharedMistake(f'{where}: state["step"] must be a number or a tensor of one, found {type(step).__name__}.')
    zero = None if step is None else torch.zeros_like(step) if isinstance(step, Tensor) else type(step)(0)
    return OptimizerClass(path=path, kind=kind, tensors=tuple(names), step=zero)


def _check_tensor(name: Any, value: Any, param: Tensor, where: str) -> None:
    if isinstance(value, Tensor) and value.shape == param.shape and value.dtype == torch.float32:
        if isinstance(name, str) and re.fullmatch(r"\w+", name) and name != "param":
            return
        raise SharedMistake(f'{where}: a checkpoint cannot name its state {name!r}. Use letters, digits and "_".')
    found = type(value).__name__
    if isinstance(value, Tensor):
        found = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} for a parameter {list(param.shape)}"
    raise SharedMistake(
        f"{where}: a checkpoint cuts the state as it cuts the parameter, so each entry must be an fp32 tensor of the "
        f'parameter\'s shape, or "step"; found state["{name}"]: {found}.'
    )


def _check_resume(found: OptimizerClass, device: torch.device | str, where: str) -> None:
    """A state of zeros must be as good as none, and what a checkpoint keeps must be all that there is."""
    straight, zeros = _Toy(found.kind, device), _Toy(found.kind, device)
    found.allocate(zeros.optimizer)
    straight.step(0, 1)
    zeros.step(0, 1)
    if not torch.equal(straight.values(), zeros.values()):
        raise SharedMistake(
            f"{where}: with a state of zeros its first steps are other ones than without state, and a checkpoint "
            f"before the first update would hold zeros ({', '.join(found.tensors)}). Let its state begin as zeros."
        )
    resumed = _Toy(found.kind, device)
    for own, param in zip(resumed.params, straight.params, strict=True):
        own.copy_(param)
        state = straight.optimizer.state.get(param, {})
        resumed.optimizer.state[own] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
    for own_group, group in zip(resumed.optimizer.param_groups, straight.optimizer.param_groups, strict=True):
        own_group |= {"step": group["step"]} if "step" in group else {}
    straight.step(2)
    resumed.step(2)
    if not torch.equal(straight.values(), resumed.values()):
        raise SharedMistake(
            f"{where}: after a resume it would go on otherwise: it keeps something beside state[param] and "
            'group["step"], which is all that a checkpoint has. Keep it in state[param].'
        )


def _check_learning_rate(found: OptimizerClass, device: torch.device | str, where: str) -> None:
    toy = _Toy(found.kind, device)
    before = toy.values()
    for group in toy.optimizer.param_groups:
        group["lr"] = group["weight_decay"] = 0.0
    toy.step(0)
    if not torch.equal(before, toy.values()):
        raise SharedMistake(
            f'{where}: with group["lr"] = 0 it still changes weights. Read group["lr"] and group["weight_decay"] in '
            "step(): the schedule writes them there before each step."
        )


@contextlib.contextmanager
def made_by(make: Callable[..., torch.optim.Optimizer] | None) -> Iterator[None]:
    """Within, megatron-core calls this where it would make Adam, by the same names. None: nothing is changed."""
    if make is None:
        yield
        return
    import megatron.core.optimizer as mcore_optimizer

    before = mcore_optimizer.Adam, mcore_optimizer.USING_PYTORCH_OPTIMIZER
    mcore_optimizer.Adam, mcore_optimizer.USING_PYTORCH_OPTIMIZER = make, False
    try:
        yield
    finally:
        mcore_optimizer.Adam, mcore_optimizer.USING_PYTORCH_OPTIMIZER = before
