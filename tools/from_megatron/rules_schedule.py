"""Lengths and schedules, as Megatron-LM counts them (``get_optimizer_param_scheduler``): by iterations, each of
--global-batch-size samples whatever a ramp makes of it, or by samples."""

from dataclasses import dataclass

from program.errors import UserError
from tools.from_megatron.draft import DEFAULT, Draft
from tools.from_megatron.rules_batch import Batches, batches

LENGTHS = ("lr-decay", "lr-wsd-decay", "lr-warmup")


@dataclass(frozen=True, slots=True)
class _Unit:
    """In what a script counts: its flags end so, as do those of the other unit, which Megatron-LM refuses."""

    own: str
    other: str
    size: int | None
    """Samples of one iteration where lengths are to be written in samples; None: they stay as they are."""

    @property
    def written(self) -> str:
        """In what the recipe counts."""
        return self.own if self.size is None else "samples"


def schedules(draft: Draft) -> None:
    """Batch sizes, the run's length, and the schedules of learning rate and weight decay."""
    batch = batches(draft)
    iters, samples = draft.arguments.whole("train-iters"), draft.arguments.whole("train-samples")
    if iters:
        unit = _Unit("iters", "samples", batch.counted)
        draft.put("train.train_iters", iters, "--train-iters")
        total = iters if batch.counted is None else iters * batch.counted
    elif samples:
        unit = _Unit("samples", "iters", None)
        total = samples
        _count_iterations(draft, batch, samples)
    else:
        raise UserError("--train-iters (or --train-samples) is missing: Megatron-LM would train nothing. Add it.")
    _refuse_other_unit(draft, unit)
    _decay(draft, unit, total, batch)
    _stable(draft, unit)
    _warmup(draft, unit)
    _weight_decay(draft, unit, total, batch)


def _count_iterations(draft: Draft, batch: Batches, samples: int) -> None:
    if draft.overrides and not draft.arguments.switch("global-batch-size"):
        draft.not_understood.append(
            f"--train-samples {samples}: how many iterations they are depends on the global batch size, which the "
            "recipe that this changes says. Add it, or set train.train_iters."
        )
    iterations = batch.iterations(samples)
    if iterations < 1:
        raise UserError(f"--train-samples {samples}: less than one batch, so that Megatron-LM would train nothing.")
    draft.put("train.train_iters", iterations, "--train-samples")
    reached = batch.schedule.consumed_after(iterations)
    if reached != samples:
        draft.notes.append(
            f"--train-samples {samples}: Triplane counts iterations; {iterations} of them are {reached} samples, as "
            "with Megatron-LM. The schedules are of the samples given."
        )


def _refuse_other_unit(draft: Draft, unit: _Unit) -> None:
    """What Megatron-LM asserts: ``expected iteration-based learning rate decay`` and the like."""
    for length in ("train", "lr-decay", "lr-warmup"):
        other = f"{length}-{unit.other}"
        if draft.arguments.whole(other):
            raise UserError(
                f"--{other} beside --train-{unit.own}: Megatron-LM refuses both. Leave one out, or write it as "
                f"--{length}-{unit.own}."
            )
    if draft.arguments.switch(other := f"lr-wsd-decay-{unit.other}"):
        draft.irrelevant.append(f"--{other}: Megatron-LM does not read it beside --train-{unit.own}")


def _length(draft: Draft, unit: _Unit, length: str) -> int | None:
    """A length in what the recipe counts."""
    value = draft.arguments.whole(f"{length}-{unit.own}")
    return value if value is None or unit.size is None else value * unit.size


def _put(draft: Draft, unit: _Unit, length: str, value: int | None, source: str = "") -> None:
    name = f"optimizer.{length.replace('-', '_')}_{unit.written}"
    draft.put(name, value, source or f"--{length}-{unit.own}")


def _decay(draft: Draft, unit: _Unit, total: int, batch: Batches) -> None:
    """Left out where it is what the iterations of the recipe consume."""
    given = _length(draft, unit, "lr-decay")
    if given is not None:
        _put(draft, unit, "lr-decay", given)
    elif unit.written == "samples" and _is_other(draft, total, batch):
        _put(draft, unit, "lr-decay", total, f"--train-{unit.own}")


def _stable(draft: Draft, unit: _Unit) -> None:
    """The end of WSD, for which Megatron-LM has no default."""
    length = _length(draft, unit, "lr-wsd-decay")
    if draft.values.get("optimizer.lr_decay_style") == "WSD" and length is None and not draft.overrides:
        raise UserError(
            f"--lr-wsd-decay-{unit.own} is missing: with --lr-decay-style WSD and --train-{unit.own}, Megatron-LM does "
            "not start without it. Add it."
        )
    _put(draft, unit, "lr-wsd-decay", length)


def _warmup(draft: Draft, unit: _Unit) -> None:
    fraction, length = draft.arguments.real("lr-warmup-fraction"), _length(draft, unit, "lr-warmup")
    if fraction is not None and length:
        raise UserError(
            f"--lr-warmup-fraction beside --lr-warmup-{unit.own}: Megatron-LM can only specify one of them. Leave one "
            "out."
        )
    if fraction is not None:
        draft.put("optimizer.lr_warmup_fraction", fraction, "--lr-warmup-fraction")
    else:
        _put(draft, unit, "lr-warmup", length or 0, "" if length is not None else DEFAULT)


def _weight_decay(draft: Draft, unit: _Unit, total: int, batch: Batches) -> None:
    """A ramp over the whole run; left out where that is what the iterations of the recipe consume."""
    if draft.values.get("optimizer.weight_decay_incr_style", "constant") == "constant":
        return
    if unit.written == "samples" and _is_other(draft, total, batch):
        draft.put("optimizer.weight_decay_incr_samples", total, f"--train-{unit.own}")


def _is_other(draft: Draft, total: int, batch: Batches) -> bool:
    """Whether so many samples are not what the iterations of the recipe consume."""
    return draft.overrides or total != batch.schedule.consumed_after(draft.values["train.train_iters"])
