"""``pretrain_gpt.py`` with one fault of its own, as ``fault.json`` beside it says. Runs in the jobs of a campaign.

Faults that come from outside (signals, links, disks) need a rank to be at a known place: there it waits for them.
Those from within (an exception, a NaN) happen there. In the first start of a job only, by default.
"""

import json
import os
import runpy
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Place = Literal["start", "data", "step", "evaluation", "save", "shutdown"]
Act = Literal["", "wait", "raise", "nan", "desync", "slow"]

FAULT = "fault.json"
SLOW_S = 0.4
"""By which every microbatch of a slow rank takes longer."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Fault:
    """What happens where, on which rank."""

    act: Act = ""
    place: Place = "step"
    iteration: int = 6
    """The iteration that a step is, or that an evaluation, a save or the end follows."""
    rank: int = 1
    pace_s: float = 0.0
    """Seconds by which every step of every rank takes longer, in the first start."""
    every_start: bool = False

    def write(self, folder: Path) -> None:
        """Leave it where the program looks for it."""
        (folder / FAULT).write_text(json.dumps(asdict(self)))


def waiting(folder: Path) -> int | None:
    """The pid of the rank that waits at its place; None while there is none."""
    path = folder / "waits"
    return int(path.read_text()) if path.exists() else None


def main(repository: Path) -> None:
    """Run the real program with the fault in it."""
    fault = Fault(**json.loads(Path(FAULT).read_text()))
    rank = int(os.environ["SLURM_PROCID"])
    if os.environ.get("SLURM_RESTART_COUNT", "0") == "0" or fault.every_start:
        _put_in(fault, rank)
    runpy.run_path(str(repository / "pretrain_gpt.py"), run_name="__main__")


def _put_in(fault: Fault, rank: int) -> None:
    mine = fault.act != "" and rank == fault.rank
    if mine and fault.place == "start":
        _happen(fault)
    from training import forward_backward, train
    from training.checkpoint import callback
    from training.evaluation import validation
    from training.run_dir import run_files
    from training.start import prepare

    if fault.pace_s:
        _before(train, "one_step", lambda *_: time.sleep(fault.pace_s))
    if not mine:
        return
    if fault.act == "nan":
        _in_a_microbatch(train, forward_backward, fault)
    elif fault.act == "slow":
        _before(train, "one_step", lambda parts, *_: _slow_down(parts.chunks))
    elif fault.act == "desync":
        _before(train, "one_step", lambda *given: _change_weight(given[0].chunks, _due(given, fault)))
    elif fault.place == "data":
        _before(prepare, "prepare", lambda *_: _happen(fault))
    elif fault.place == "step":
        _before(train, "one_step", lambda *given: _happen(fault, _due(given, fault)))
    elif fault.place == "evaluation":
        _before(validation.Validation, "_measure", lambda *given: _happen(fault, given[1].iteration == fault.iteration))
    elif fault.place == "save":
        _before(
            callback.SaveCallback, "_hand_over", lambda *given: _happen(fault, given[1].iteration == fault.iteration)
        )
    else:
        _before(run_files, "mark", lambda *_: _happen(fault))


def _before(owner: Any, name: str, first: Callable[..., object]) -> None:
    """Have ``first`` called, with the same arguments, before ``owner.name``."""
    original = getattr(owner, name)

    def both(*given: Any, **named: Any) -> Any:
        first(*given)
        return original(*given, **named)

    setattr(owner, name, both)


def _due(given: tuple[Any, ...], fault: Fault) -> bool:
    """Whether these arguments of ``train.one_step`` are of the iteration before which the fault comes."""
    return bool(given[2].iteration + 1 == fault.iteration)


def _happen(fault: Fault, due: bool = True) -> None:
    if not due:
        return
    if fault.act == "raise":
        raise RuntimeError("injected: this rank's code is wrong")
    Path("waits.new").write_text(str(os.getpid()))
    Path("waits.new").rename("waits")
    while not Path("go").exists():
        time.sleep(0.05)


def _in_a_microbatch(train: Any, forward_backward: Any, fault: Fault) -> None:
    """The first one of the iteration, once: not a number."""
    original, due = forward_backward.forward_step, [False]

    def begin(*given: Any) -> None:
        due[0] = _due(given, fault)

    def forward_step(microbatches: Any, chunk: Any) -> Any:
        output, loss = original(microbatches, chunk)
        if due[0]:
            due[0] = False
            output = output * float("nan")
        return output, loss

    _before(train, "one_step", begin)
    forward_backward.forward_step = forward_step


def _slow_down(chunks: Any) -> None:
    """As a card that computes slowly would: within its own computing, where no rank waits for another."""
    [layer] = [module for path, module in chunks[0].named_modules() if path.endswith("decoder.layers.0.mlp")]
    if not layer._forward_hooks:
        layer.register_forward_hook(lambda *_: time.sleep(SLOW_S))


def _change_weight(chunks: Any, due: bool) -> None:
    """As a flipped bit would: on this replica alone."""
    if due:
        next(chunks[0].parameters()).data.view(-1)[0] += 1.0
