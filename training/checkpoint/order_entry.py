"""How far a run has read its sources, as a checkpoint keeps it: what the next order of samples begins with."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from data.gaps import Gaps, Ranges, continued
from data.order_begin import RUN_BEGIN, OrderBegin, Read, read_until
from data.prepared import Prepared
from program.errors import SharedMistake
from program.number_ranges import read_ranges
from program.schema import JSON, Count, structured
from training.config.run_config import RunConfig
from training.progress import Progress

ENTRY = "order"
"""Among the entries of ``state.json``."""


@dataclass(kw_only=True, slots=True, frozen=True)
class OrderEntry:
    """What lies there."""

    iteration: Count
    """Iterations before the order that was read."""
    samples: Count
    """Global samples before it."""
    before: Mapping[str, Read]
    """Of each source, what was read before that order."""
    now: Mapping[str, Read]
    """And until now."""
    skipped: tuple[tuple[Count, Count], ...] = ()
    """Ranges [first, end) of global samples before now that were not trained on."""


def noted(prepared: Prepared, config: RunConfig, begin: OrderBegin, gaps: Gaps, progress: Progress) -> dict[str, JSON]:
    """The entry of a checkpoint of now."""
    if prepared.splits:  # megatron-core's order, which goes on for ever
        return {}
    consumed, seq_length = progress.consumed_samples, config.model.seq_length
    now = read_until(prepared, config.data, seq_length, config.train.seed, begin, gaps.behind(consumed))
    entry = OrderEntry(
        iteration=config.own_stage.data_iteration, samples=begin.samples, before=begin.read, now=now,
        skipped=gaps.met(consumed),
    )  # fmt: skip
    return {ENTRY: asdict(entry)}


def gaps_of(entries: Mapping[str, JSON], config: RunConfig, progress: Progress) -> tuple[Gaps, Ranges]:
    """The gaps of the order that training continues, and what of ``data.samples_to_skip`` comes too late for it."""
    entry, problems = structured(entries.get(ENTRY), OrderEntry)
    met = () if problems or not progress.consumed_samples else entry.skipped
    return continued(met, read_ranges(config.data.samples_to_skip), progress.consumed_samples)


def begins_here(config: RunConfig, progress: Progress) -> bool:
    """Whether a new order begins with the next sample."""
    return config.own_stage.data_iteration == progress.iteration > 0


def found(entries: Mapping[str, JSON], config: RunConfig, progress: Progress, gaps: Gaps, path: Path) -> OrderBegin:
    """Where the order begins that training continues. path: the checkpoint, which ``noted`` has filled.

    Raises SharedMistake where the checkpoint says nothing of it and something is needed, or where the order began at
    another sample than this recipe's stages have it begin.
    """
    expected = config.own_stage.data_iteration
    if not progress.consumed_samples or (ENTRY not in entries and not expected):
        return RUN_BEGIN
    entry, problems = structured(entries.get(ENTRY), OrderEntry)
    if problems:
        raise SharedMistake(
            f"{path}: entries.{ENTRY} of state.json does not say how far the data was read ({problems[0]}), which "
            "[[stage]] goes on from. A version without stages wrote it: save once with this one, without [[stage]]."
        )
    if begins_here(config, progress):
        return OrderBegin(samples=gaps.behind(progress.consumed_samples), read=entry.now)
    # Without stages it is a branch's, or a stage's checkpoint that is continued by itself: in the order that it has.
    if config.begin is not None and entry.iteration != expected and not config.data.allow_data_change:
        raise SharedMistake(
            f"{path} was written in an order of data that began after iteration {entry.iteration:,}; by this recipe's "
            f"[[stage]] tables it began after {expected:,}. A stage that has begun keeps its data: give it what it "
            "had, or --data.allow_data_change True if that is meant."
        )
    return OrderBegin(samples=entry.samples, read=entry.before)
