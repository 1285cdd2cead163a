"""Schedules of scripts against Megatron-LM's own code, iteration by iteration: batch, learning rate, weight decay.

``get_optimizer_param_scheduler`` and ``update_train_iters`` are taken out of the installed
megatron/training/training.py, which takes ten seconds to import, and build megatron-core's scheduler and batch sizes.
"""

import argparse
import ast
import importlib.util
import itertools
import random
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from program.errors import UserError
from tests.tools.megatron_scripts import drafted
from tools.from_megatron.convert import convert, read_back
from training.config.schedules import batch_schedule, learning_schedule

MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--vocab-size 1000 --tokenizer-type NullTokenizer --micro-batch-size 1"
)
FLOATS = ("lr", "min-lr", "lr-warmup-init", "lr-warmup-fraction", "weight-decay", "start-weight-decay",
          "end-weight-decay")  # fmt: skip
TEXTS = ("lr-decay-style", "lr-wsd-decay-style", "weight-decay-incr-style", "step-batch-size-schedule")
WHOLE = ("train-iters", "train-samples", "lr-decay-iters", "lr-decay-samples", "lr-wsd-decay-iters",
         "lr-wsd-decay-samples", "lr-warmup-iters", "lr-warmup-samples", "global-batch-size",
         "micro-batch-size")  # fmt: skip
USUAL = {
    "lr_warmup_iters": 0, "lr_warmup_samples": 0, "lr_warmup_init": 0.0, "min_lr": 0.0, "weight_decay": 0.01,
    "lr_decay_style": "linear", "lr_wsd_decay_style": "exponential", "weight_decay_incr_style": "constant",
}  # fmt: skip


@dataclass
class Ramp:
    """RampupBatchsizeNumMicroBatchesCalculator of Megatron-LM until 532ad926 (2026-04-21), by its ``update``."""

    start: int
    increment: int
    samples: int
    full: int

    def at(self, consumed: int) -> int:
        if consumed > self.samples:
            return self.full
        growths = (self.full - self.start) // self.increment
        return self.start + int(consumed / (self.samples / growths)) * self.increment

    def train_iters(self, samples: int) -> int:
        """``update_train_iters`` of then."""
        iterations = consumed = 0
        while consumed <= self.samples and consumed <= samples:
            consumed += self.at(consumed)
            iterations += 1
        return iterations + max(0, samples - consumed) // self.full


@dataclass
class Megatron:
    """What Megatron-LM makes of flags."""

    args: Any
    ramp: Ramp | None = None
    steps: Any = None
    group: dict[str, float] = field(default_factory=dict)

    def batch(self, consumed: int) -> int:
        if self.ramp is not None:
            return self.ramp.at(consumed)
        if self.steps is None:
            return int(self.args.global_batch_size)
        self.steps.update(consumed, consistency_check=False)
        return int(self.steps.get_current_global_batch_size())

    def iterations(self) -> Iterator[tuple[int, float, float]]:
        """Batch, learning rate and weight decay of each."""
        scheduler, consumed = self._scheduler(), 0
        for _ in range(self.args.train_iters):
            size = self.batch(consumed)
            yield size, self.group["lr"], self.group["weight_decay"]
            scheduler.step(increment=size)
            consumed += size

    def _scheduler(self) -> Any:
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        at = [0]
        names = {
            "get_args": lambda: self.args,
            "OptimizerParamScheduler": OptimizerParamScheduler,
            "print_rank_0": print,
            "update_num_microbatches": lambda consumed, consistency_check: at.__setitem__(0, consumed),
            "get_current_global_batch_size": lambda: self.batch(at[0]),
        }
        exec(compile(own_code(), "training.py", "exec"), names)
        if self.ramp is not None and self.args.train_samples:
            names["update_train_iters"] = lambda args: setattr(
                args, "train_iters", self.ramp.train_iters(args.train_samples)
            )
        build: Any = names["get_optimizer_param_scheduler"]
        return build(SimpleNamespace(param_groups=[self.group]))


def own_code() -> ast.Module:
    """Megatron-LM's two functions."""
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).parents[1] / "training" / "training.py"
    wanted = ("get_optimizer_param_scheduler", "update_train_iters")
    body = [node for node in ast.parse(source.read_text()).body if getattr(node, "name", "") in wanted]
    assert len(body) == len(wanted)
    return ast.Module(body, [])


def megatron(flags: str, ranks: int = 1) -> Megatron:
    """As ``parse_args`` and ``validate_args`` do."""
    from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator

    parser = argparse.ArgumentParser(allow_abbrev=False)
    kinds: dict[str, Any] = {**dict.fromkeys(FLOATS, float), **dict.fromkeys(TEXTS, str), **dict.fromkeys(WHOLE, int)}
    for name, kind in kinds.items():
        parser.add_argument(f"--{name}", type=kind, default=USUAL.get(name.replace("-", "_")))
    parser.add_argument("--rampup-batch-size", nargs=3, type=int)
    args, _ = parser.parse_known_args(shlex.split(flags))
    args.use_checkpoint_opt_param_scheduler = args.override_opt_param_scheduler = False
    if args.weight_decay_incr_style == "constant":
        args.start_weight_decay = args.end_weight_decay = args.weight_decay
    args.global_batch_size = args.global_batch_size or args.micro_batch_size * ranks
    found = Megatron(args)
    if args.rampup_batch_size:
        found.ramp = Ramp(*args.rampup_batch_size, args.global_batch_size)
    if args.step_batch_size_schedule:
        found.steps = StepBatchsizeNumMicroBatchesCalculator(1, 1, False, 1, args.step_batch_size_schedule, 128)
    return found


def compare(flags: str, ranks: int | None = None) -> None:
    started = "" if ranks is None else f"torchrun --nproc-per-node {ranks} pretrain_gpt.py "
    config = read_back(convert(f"{started}{MODEL} {flags}", "", {})[0])
    batches, schedule = (
        batch_schedule(config.train, config.model.seq_length),
        learning_schedule(config.optimizer, config.train, config.model.seq_length),
    )
    expected = list(megatron(f"{MODEL} {flags}", ranks or 1).iterations())
    assert config.train.train_iters == len(expected), flags
    assert schedule.problems() == [], flags
    consumed = 0
    for iteration, (size, rate, decay) in enumerate(expected):
        assert batches.global_batch_size_at(consumed) == size, (flags, iteration)
        assert schedule.learning_rate(consumed) == pytest.approx(rate, rel=1e-12, abs=0), (flags, iteration)
        assert schedule.weight_decay(consumed) == pytest.approx(decay, rel=1e-12, abs=0), (flags, iteration)
        consumed += size


RAMP = "--rampup-batch-size 2 2 200 --global-batch-size 16"
STEPS = "--step-batch-size-schedule '0:2 12.8K:4 25.6K:6 38.4K:8'"
WEIGHTS = "--weight-decay-incr-style cosine --start-weight-decay 0.01 --end-weight-decay 0.2"


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        (f"{RAMP} --train-samples 2000 --lr-warmup-fraction 0.05 --lr 1e-3", None),
        (f"{RAMP} --train-samples 2003 --lr 1e-3 --lr-decay-style WSD --lr-wsd-decay-samples 200", None),
        (f"{RAMP} --train-samples 2003 --lr-warmup-fraction 0.0123 --lr 1e-3 --lr-decay-style cosine {WEIGHTS}", None),
        (f"{RAMP} --train-samples 150 --lr-warmup-samples 33 --lr 1e-3", None),  # ends within the ramp
        (f"{RAMP} --train-samples 200 --lr-warmup-samples 33 --lr 1e-3", None),
        ("--global-batch-size 8 --train-samples 1000 --lr-decay-samples 903 --lr-warmup-samples 13 --lr 1e-3", None),
        (f"--global-batch-size 8 --train-samples 1003 --lr 1e-3 {WEIGHTS}", None),
        ("--global-batch-size 8 --train-iters 77 --lr-warmup-fraction 0.031 --lr-decay-iters 70 --lr 1e-3", None),
        ("--global-batch-size 8 --train-iters 50 --lr-decay-style WSD --lr-wsd-decay-iters 0 --lr 1e-3", None),
        ("--global-batch-size 8 --train-iters 50 --lr-decay-style WSD --lr-wsd-decay-iters 50 --lr-warmup-iters 9 "
         "--lr 1e-3 --lr-wsd-decay-style minus_sqrt", None),
        ("--global-batch-size 8 --train-iters 50 --lr-warmup-init 1e-5 --lr-warmup-iters 9 --min-lr 1e-6 --lr 1e-3 "
         f"--lr-decay-style inverse-square-root {WEIGHTS}", None),
        (f"{STEPS} --train-samples 1003 --lr-warmup-fraction 0.1 --lr-decay-style cosine --lr 1e-3 {WEIGHTS}", None),
        ("--step-batch-size-schedule '0:8 12.8K:2,90K:6' --train-samples 1003 --lr 1e-3", None),
        (f"{STEPS} --train-iters 100 --lr-warmup-iters 5 --lr-decay-iters 90 --lr 1e-3 {WEIGHTS}", 4),
        (f"{RAMP} --train-iters 100 --lr-warmup-iters 5 --lr-decay-style WSD --lr-wsd-decay-iters 10 --lr 1e-3", None),
        ("--train-iters 100 --lr-warmup-iters 5 --lr 1e-3", 4),
    ],
)  # fmt: skip
def test_a_schedule_is_megatron_s_in_every_iteration(flags: str, ranks: int | None) -> None:
    compare(flags, ranks)


def drawn(seed: int) -> str:
    """Flags that Megatron-LM starts with."""
    pick = random.Random(seed)
    full, unit = pick.choice([4, 8, 12, 16]), pick.choice(["iters", "samples"])
    total = pick.randint(30, 120) if unit == "iters" else pick.randint(300, 1500)
    decay = pick.choice([total, pick.randint(total // 2, total * 2)])
    flags = [f"--train-{unit} {total} --lr {pick.choice(['1e-3', '3e-4', '0.00017'])}"]
    if decay != total:
        flags.append(f"--lr-decay-{unit} {decay}")
    style = pick.choice(["constant", "linear", "cosine", "inverse-square-root", "WSD"])
    flags.append(f"--lr-decay-style {style}")
    if style == "WSD":
        form = pick.choice(["exponential", "linear", "cosine", "minus_sqrt"])
        flags.append(f"--lr-wsd-decay-{unit} {pick.randint(0, decay)} --lr-wsd-decay-style {form}")
    flags += pick.choice([
        [], [f"--lr-warmup-{unit} {pick.randint(0, decay // 2)}"], [f"--lr-warmup-fraction {pick.uniform(0, 0.9):.4g}"],
    ])  # fmt: skip
    flags += pick.choice([[], ["--min-lr 1e-5"]]) + pick.choice([[], ["--lr-warmup-init 2e-6"]])
    flags += pick.choice([[], ["--weight-decay 0.1"], [WEIGHTS], [WEIGHTS.replace("cosine", "linear")]])
    sizes = range(2, full + 1, 2)
    pause = pick.randint(5, 60)
    steps = " ".join(f"{128 * pause * number}:{size}" for number, size in enumerate(sizes))
    batch = pick.choice(["", f"--rampup-batch-size 2 2 {pause * (len(sizes) - 1)}", "steps"])
    flags.append(f"--step-batch-size-schedule '{steps}'" if batch == "steps" else f"{batch} --global-batch-size {full}")
    return " ".join(flags)


@pytest.mark.parametrize("seed", range(40))
def test_a_drawn_schedule_is_megatron_s(seed: int) -> None:
    compare(drawn(seed), 2)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--train-iters 10 --train-samples 100", "--train-samples beside --train-iters"),
        ("--train-iters 10 --lr-decay-samples 100", "--lr-decay-samples beside --train-iters"),
        ("--train-samples 80 --lr-warmup-iters 3", "--lr-warmup-iters beside --train-samples"),
        ("--train-iters 10 --lr-warmup-iters 3 --lr-warmup-fraction 0.1", "can only specify one of them"),
        ("--train-iters 10 --lr-decay-style WSD", "--lr-wsd-decay-iters is missing"),
        ("--train-samples 80 --lr-decay-style WSD --lr-wsd-decay-iters 3", "--lr-wsd-decay-samples is missing"),
        ("--train-samples 3", "less than one batch"),
    ],
)
def test_what_megatron_lm_asserts_is_refused(flags: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        drafted(f"{MODEL} --global-batch-size 8 --lr 1e-3 {flags}")
    assert message in str(caught.value)


def test_batches_that_are_given_twice_are_not_understood() -> None:
    flags = f"{MODEL} --lr 1e-3 --train-samples 800 --step-batch-size-schedule '0:2 1K:4'"
    (said,) = drafted(f"{flags} --global-batch-size 8").not_understood
    assert "refuses both" in said
    assert drafted(flags).not_understood == []


def test_lengths_of_zero_are_legal() -> None:
    zeros = itertools.product(("--train-iters 10", "--train-samples 80"), ("0", "0.0"))
    for length, zero in zeros:
        unit = length.split()[0].removeprefix("--train-")
        flags = f"{length} --global-batch-size 8 --lr 1e-3 --lr-warmup-{unit} 0 --lr-warmup-fraction {zero}"
        compare(f"{flags} --lr-warmup-init 0 --min-lr 0 --weight-decay 0 --lr-decay-style WSD --lr-wsd-decay-{unit} 0")
