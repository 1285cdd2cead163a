"""What validation losses are measured on: the data's validation split, the part of each of its sources, and the sets of
``eval.validation_sets``."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from data.cache import Console
from data.config import DataConfig
from data.full_pass import FullPass
from data.prepare import prepare as prepare_data
from data.prepared import Prepared, Samples, SourcedSamples
from data.source import BlendedSource, build_part, build_source
from data.token_source import TokenSource
from data.transformed import unchanged
from program.errors import UserError
from training.config.run_config import RunConfig
from training.config.small_sections import has_own_split


@dataclass(kw_only=True, slots=True, frozen=True)
class ValidationSet:
    """Held-out text with a loss of its own."""

    name: str
    """Of ``eval.validation_sets``, or of a source by itself; "" for the data's validation split."""
    open_samples: Callable[[], Samples]
    """From the first sample on. Where memory is mapped, it costs nothing to open what another rank reads."""
    has_sources: bool = False
    """Each source has a loss of its samples among these, beside that of all."""


@dataclass(kw_only=True, slots=True, frozen=True)
class OpenSet:
    """One that is open, with the metrics that it gives."""

    samples: Samples
    metric: str
    by_source: tuple[str, ...]
    """A metric for each source; none where there is one."""

    @classmethod
    def of(cls, described: ValidationSet) -> "OpenSet":
        """Opened from its first sample on."""
        samples = described.open_samples()
        names = samples.names if described.has_sources and isinstance(samples, SourcedSamples) else []
        metric = f"validation_loss/{described.name}" if described.name else "validation_loss"
        return cls(samples=samples, metric=metric, by_source=tuple(f"validation_loss/{name}" for name in names))

    @property
    def metrics(self) -> tuple[str, ...]:
        """All of them, that of the whole first."""
        return (self.metric, *self.by_source)

    def rows_of(self, sample_indices: np.ndarray) -> np.ndarray:
        """Where in ``metrics`` the loss of each sample counts, beside the first: [n] int64."""
        if not self.by_source or not isinstance(self.samples, SourcedSamples):
            return np.zeros(len(sample_indices), np.int64)
        return 1 + self.samples.source_of(sample_indices).astype(np.int64)


def prepare_sets(prepared: Prepared, config: RunConfig, console: Console) -> Prepared:
    """``prepared`` with the sets of ``eval.validation_sets``, found in the cache or tokenised.

    Raises UserError for missing, damaged or empty inputs, and for a name that a source of the blend has.
    """
    found = {}
    sources = {source.name for source in prepared.sources} if prepared.blend is not None else set()
    for name, path in config.eval.validation_sets.items():
        if name in sources and has_own_split(config.eval, config.data):
            raise UserError(
                f"eval.validation_sets: {name} is a source of the blend, too, whose part of the validation split is "
                f"logged as validation_loss/{name}. Give the set another name."
            )
        try:
            found[name] = prepare_data(_data_of(config.data, path), console, prepared.tokenizer)
        except UserError as error:
            raise UserError(f"eval.validation_sets: {name}: {re.sub(r'^data(\.\w+)?: ', '', str(error))}") from None
        tokens, least = sum(shard.token_count for shard in found[name].shards), config.model.seq_length + 1
        if tokens < least:
            raise UserError(
                f"eval.validation_sets: {name} holds {tokens:,} tokens; one sample needs model.seq_length + 1 = "
                f"{least:,}. Give more text."
            )
    return replace(prepared, validation_sets=found)


def open_all(prepared: Prepared, config: RunConfig) -> None:
    """Raises UserError where a set cannot be opened, or fills no sample."""
    for one in validation_sets(prepared, config):
        one.open_samples()


def validation_sets(prepared: Prepared, config: RunConfig) -> list[ValidationSet]:
    """All that a run measures, in the order in which it does."""
    by_itself = config.eval.by_source and not config.eval.full_pass  # which measures all of each source at once
    sources = [source.name for source in prepared.sources] if by_itself and prepared.blend is not None else []
    own = ValidationSet(
        name="",
        open_samples=_opened(partial(build_source, prepared, config.data, split="validation"), config),
        has_sources=prepared.blend is not None and not sources,
    )
    part = partial(build_part, prepared, config.data, split="validation")
    parts = [
        ValidationSet(name=name, open_samples=_opened(partial(part, number=number), config))
        for number, name in enumerate(sources)
    ]
    whole = _data_of(config.data, "")
    named = [
        ValidationSet(name=name, open_samples=_opened(partial(build_source, held, whole, split="train"), config))
        for name, held in prepared.validation_sets.items()
    ]
    return [own, *parts, *named] if has_own_split(config.eval, config.data) else named


def _opened(build: Callable[..., Samples], config: RunConfig) -> Callable[[], Samples]:
    def open_samples() -> Samples:
        samples = build(seq_length=config.model.seq_length, seed=config.train.seed)
        read = unchanged(samples)  # a full pass is of the text as it stands
        if config.eval.full_pass and isinstance(read, TokenSource | BlendedSource):
            return FullPass(read)
        return samples

    return open_samples


def _data_of(data: DataConfig, path: str) -> DataConfig:
    """The data section of a set, all of whose documents are in its first split, as they stand."""
    return replace(
        data, paths=(), blend={path: 1.0} if path else {}, blend_file=None, stream=(), stream_blend={},
        order="exact", megatron_train_samples=None, split="1", packing="concatenate", transform=None, fim_rate=0.0,
    )  # fmt: skip
