"""`data.order = "megatron"`: megatron-core's own datasets, for those who continue a run of Megatron-LM's.

What goes wrong with them is closed here. Their order depends on the number of samples that the whole training takes:
it is part of the plan that a checkpoint keeps. Their cache is known by names alone and written file by file: ours is
known by what its shards are (data/raw/identity.py), and gets its name when it is whole. And they are built before any
process group exists, so that no rank waits for another.
"""

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from data import cache
from data.config import DataConfig
from data.prepared import Prepared, SourceProgress, digest
from data.raw.identity import identity
from data.shards import bin_path, idx_path
from data.split import SPLITS, SplitName
from data.tokenizers.base import Tokenizer
from program.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePlan:
    """Samples that each split gives over the whole training, as Megatron counts them."""

    train: int
    validation: int
    test: int

    @classmethod
    def from_schedule(
        cls, train_samples: int, train_iters: int, global_batch_size: int, eval_interval: int | None, eval_iters: int
    ) -> "SamplePlan":
        """Megatron-LM's sizes (megatron/training/training.py, get_train_valid_test_num_samples); none of what is not
        read here: the test split, and validation without eval_interval. What the others give does not depend on it.
        """
        rounds = train_iters // eval_interval + 1 if eval_interval else 0
        validation = rounds * eval_iters * global_batch_size
        return cls(train=train_samples, validation=validation, test=0)

    def entries(self) -> dict[str, int]:
        """What a checkpoint keeps of it: a change is another order."""
        return {"megatron_train_samples": self.train}


class MegatronSource:
    """Samples of a GPTDataset, or of several that are blended."""

    def __init__(self, dataset: Any, seq_length: int, vocab_size: int, names: list[str]) -> None:
        self.dataset, self.seq_length, self.vocab_size, self.names = dataset, seq_length, vocab_size, names

    def fetch(self, sample_indices: np.ndarray) -> np.ndarray:
        """Tokens [n, seq_length + 1] int32 of global sample indices [n] int64.

        Raises UserError beyond the plan, and for an id outside the vocabulary.
        """
        beyond = sample_indices[sample_indices >= len(self.dataset)]
        if beyond.size:
            raise UserError(
                f'data.order = "megatron": sample {beyond[0]} is beyond the {len(self.dataset)} of the plan that '
                "train.train_iters, or data.megatron_train_samples, gives."
            )
        samples = np.empty((len(sample_indices), self.seq_length + 1), np.int64)
        for sample, index in zip(samples, sample_indices.tolist(), strict=True):
            item = self.dataset[index]
            sample[:-1], sample[-1] = item["tokens"].numpy(), item["labels"][-1]
        if (beyond := samples[samples.view(np.uint64) >= self.vocab_size]).size:
            raise UserError(
                f"data: token id {beyond[0]} in samples {sample_indices}; the vocabulary "
                f"has {self.vocab_size} ids. A shard is damaged (`python -m tools.preprocess verify PREFIX` names it), "
                "or has no manifest and was made with another tokenizer than data.tokenizer."
            )
        return samples.astype(np.int32)

    def source_of(self, sample_indices: np.ndarray) -> np.ndarray:
        """Number in `names` of the source of each sample: [n]."""
        if not hasattr(self.dataset, "dataset_index"):
            return np.zeros(len(sample_indices), np.int64)
        return self.dataset.dataset_index[sample_indices]

    def sources(self, consumed_samples: int) -> dict[str, SourceProgress]:
        """How often each source has been gone through, nearly: its samples by those that an epoch fills."""
        if not hasattr(self.dataset, "dataset_index"):
            return {"data": SourceProgress(consumed_samples, consumed_samples / self._per_epoch(self.dataset))}
        counts = np.bincount(self.dataset.dataset_index[:consumed_samples], minlength=len(self.names))
        sizes = map(self._per_epoch, self.dataset.datasets)
        read = zip(self.names, counts.tolist(), sizes, strict=True)
        return {name: SourceProgress(count, count / size) for name, count, size in read}

    def _per_epoch(self, dataset: Any) -> float:
        return max(1.0, float(dataset.dataset.sequence_lengths[dataset.indices].sum(dtype=np.int64)) / self.seq_length)


class _Adapter:
    """What GPTDatasetConfig asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.vocab_size, self.eod = tokenizer.vocab_size, tokenizer.eod
        self.pad = -1  # no id: nothing is masked
        self.unique_identifiers = {"fingerprint": tokenizer.fingerprint}


def open_splits(
    prepared: Prepared, config: DataConfig, seq_length: int, seed: int, plan: SamplePlan, console: cache.Console
) -> dict[SplitName, MegatronSource]:
    """megatron-core's datasets of all splits, their index files found in the cache or made. Call it before process
    groups exist. Raises UserError for a blend that Megatron cannot have.
    """
    if found := next((shard for shard in prepared.shards if shard.cache is not None), None):
        raise UserError(
            f'data.order = "megatron": megatron-core reads {found.prefix.name}.bin itself, which is in a bucket. Copy '
            'the shards to a disk, or leave data.order at "exact".'
        )
    blend = _blend(prepared)
    target = cache.root(config) / "megatron" / _key(prepared, config, seq_length, seed, plan)

    def build(part: Path) -> None:
        # megatron-core follows every length and pointer unseen: one that is damaged would train on other tokens
        # without a word. It costs reading 20 bytes a document, of which megatron-core reads 4 here itself, and 1.3 s
        # for 100 million documents, on one core and from the page cache; once for a cache.
        for shard in prepared.shards:
            shard.check_index()
        _build(prepared, config, seq_length, seed, plan, blend, part)

    # Where something is missing, megatron-core would make it in place, in every process at once, and end in the middle
    # of numpy where a file is too short.
    cache.build_once(target, build, console)
    datasets = _build(prepared, config, seq_length, seed, plan, blend, target)
    if (dataset := datasets[0]) is not None and len(dataset) < plan.train:
        raise UserError(
            f'data.order = "megatron": {len(blend[0])} shards without weights are gone through once, which gives '
            f"{len(dataset)} samples; training takes {plan.train}. Give them weights (data.blend), or join them with "
            "tools.preprocess --merge."
        )
    names = [source.name for source in prepared.sources] if blend[1] else [prefix.name for prefix in prepared.prefixes]
    return {
        name: MegatronSource(dataset, seq_length, prepared.tokenizer.vocab_size, names)
        for name, dataset in zip(SPLITS, datasets, strict=True)
        if dataset is not None
    }


def _blend(prepared: Prepared) -> tuple[list[str], list[float] | None]:
    """Prefixes, and weights where there are any: as given, since 2^-20 more or less is another order of Megatron's."""
    if prepared.blend is None:
        return [str(prefix) for prefix in prepared.prefixes], None
    for source in prepared.sources:
        if len(source.prefixes) > 1:
            raise UserError(
                f'data.order = "megatron": source {source.name} has {len(source.prefixes)} shards, and Megatron weighs '
                'each. Join them with tools.preprocess --merge, or use data.order = "exact".'
            )
    return [str(source.prefixes[0]) for source in prepared.sources], [one.weight for one in prepared.sources]


def _build(
    prepared: Prepared,
    config: DataConfig,
    seq_length: int,
    seed: int,
    plan: SamplePlan,
    blend: tuple[list[str], list[float] | None],
    folder: Path,
) -> list[Any]:
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    given = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        blend=blend,
        split=config.split,
        path_to_cache=str(folder),
        tokenizer=_Adapter(prepared.tokenizer),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    sizes = [plan.train, plan.validation, plan.test]
    assert given.split_matrix is not None
    for number, (name, size) in enumerate(zip(SPLITS, sizes, strict=True)):
        if not size:
            given.split_matrix[number] = None
        elif given.split_matrix[number] is not None:
            _check_split(prepared, name, given.split_matrix[number])
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, given).build()


def _check_split(prepared: Prepared, name: SplitName, bounds: tuple[float, float]) -> None:
    """megatron-core looks forever for samples in a split without documents."""
    for shard in prepared.shards:
        first, last = (round(bound * shard.document_count) for bound in bounds)
        if last <= first:
            raise UserError(
                f"data: {shard.prefix} has no document in the {name} split, as Megatron cuts it. Change data.split, or "
                "give more documents."
            )


def _key(prepared: Prepared, config: DataConfig, seq_length: int, seed: int, plan: SamplePlan) -> str:
    """Everything that the index files follow from."""
    parts = [version("megatron-core"), str(plan), str(seq_length), str(seed), config.split, prepared.fingerprint]
    for prefix in prepared.prefixes:
        for path in (bin_path(prefix), idx_path(prefix)):
            parts.append(identity(path))
    parts += [str(source.weight) for source in prepared.sources]
    return digest(parts)
