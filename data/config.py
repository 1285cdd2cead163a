"""The `data` section: which text, which tokenizer, and how documents are split."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from program import number_ranges

TEXTS = ("paths", "blend", "blend_file", "stream", "stream_blend")
"""Fields that say what to train on, of which one is given."""
MOST_STREAMS = 65_536
MOST_CURSORS = 1 << 20
MOST_SOURCES = 65_535
"""Of a blend: its table holds their numbers in 16 bits."""


@dataclass(kw_only=True, slots=True, frozen=True)
class DataConfig:
    """Which text to train on, and how it becomes tokens."""

    paths: tuple[str, ...] = ()
    """Prefixes of .bin/.idx files, or raw files (JSON lines, parquet, csv, text; also as .gz, .zst, .bz2 or .xz), which
    are tokenised once; either in buckets, too (s3://BUCKET/PREFIX). Empty: the built-in corpus, which is the Python
    standard library's own sources."""

    blend: Mapping[str, float] = field(default_factory=dict)
    """Weights of several sources, in place of data.paths: a table of prefix, file or glob = weight. All that one
    line names is one source. Weights need not sum to 1; they are rounded to multiples of 2^-20."""

    blend_file: str | None = None
    """The same in a file: a TOML table, or Megatron's "weight path weight path …" (--data-args-path)."""

    stream: tuple[str, ...] = ()
    """Raw files, folders, globs (of buckets, too) or Hugging Face datasets (hf://OWNER/NAME, or one commit of it by
    #REVISION behind that), tokenised while training goes on, in place of data.paths. data.split goes by a hash of each
    document's text then."""

    stream_blend: Mapping[str, float] = field(default_factory=dict)
    """Weights of several streamed sources, in place of data.stream: a table of file, folder, glob or dataset = weight.
    Each is dealt to stream_count streams of its own; weights are rounded as those of data.blend."""

    stream_count: int = 64
    """Logical streams that data.stream is dealt to: global sample i is the next one of stream i modulo this. Each is
    read by one data rank where this is a multiple of data-parallel size x micro_batch_size."""

    stream_shuffle: int = 0
    """Documents of a stream that come mixed, each so many of those that follow one another; 0: as they stand. A data
    rank keeps so many, tokenised, for each stream that it reads of each source (1000 of 1000 tokens: 4 MB), and a
    resume tokenises at most so many again."""

    on_bad_document: Literal["stop", "skip"] = "stop"
    """data.stream only. A line that is no JSON, lacks the field or is no UTF-8 ends the run, or is left out."""

    max_document_mb: float = 64.0
    """data.stream only. A longer document (10^6 bytes) is a bad one."""

    max_expansion: float = 200.0
    """Bytes that one byte of a compressed file may unpack to, over the whole file."""

    samples_to_skip: tuple[int | str, ...] = ()
    """Samples that are never trained on, by their numbers in the order from 0, as "1000000-1001999" (both included).
    The following ones are taken instead, as after spikes of PaLM's (arXiv:2204.02311, section 5.1). What a resume adds
    changes nothing of what has been trained on."""

    order: Literal["exact", "megatron"] = "exact"
    """"exact": a sample is a function of the seed and its number alone. "megatron": megatron-core's GPTDataset, to
    continue a run of Megatron-LM's; the order then depends on how many samples the whole training takes."""

    megatron_train_samples: int | None = None
    """data.order "megatron" only: --train-samples of the run that is continued. None: what train_iters take, as with
    --train-iters."""

    require_manifest: bool = False
    """Refuse shards without a manifest, which cannot be checked; they are Megatron's, or of an old version."""

    allow_data_change: bool = False
    """Continue a run although its data is not what it was: other samples, or in another order."""

    tokenizer: str = "builtin"
    """Path of a SentencePiece or Llama .model, a Hugging Face tokenizer.json, GPT-2's vocab.json beside its merges.txt
    (or both, with a comma between) or a .tiktoken file, or of a folder with one of these; or "byte": one id a byte; or
    "builtin": a SentencePiece model trained on the built-in corpus."""

    eod_token: str | None = None
    """What ends a document, where a tokenizer.json does not say: the text of a control token, as "<|endoftext|>"."""

    builtin_vocab_size: int = 2048
    """Pieces of the built-in tokenizer (512 to 32768)."""

    split: str = "969,30,1"
    """Weights of training, validation and test, by document."""

    cache_dir: str | None = None
    """Where tokenised files are kept. None: the user's cache folder. Need not be shared between nodes."""

    bucket_cache_gb: float = 100.0
    """Of data.cache_dir, what the blocks of shards in buckets may take, in 10^9 bytes, on each machine. Where the
    shards are larger, blocks are fetched again."""

    jsonl_key: str = "text"
    """The field of a .jsonl line, or column, that holds its document (Megatron's --json-keys); doc.text is the field
    text of doc."""

    csv_column: str | None = None
    """The column of .csv and .tsv files that holds the document, by its name in the header. None: data.jsonl_key, and
    folders of data.stream are read without such files."""

    reset_attention_mask: bool = False
    """Documents packed into one sample do not attend to one another (Megatron's --reset-attention-mask)."""

    reset_position_ids: bool = False
    """Positions restart with each document, learned ones and RoPE's. Without reset_attention_mask documents see one
    another all the same; Megatron's RoPE then does not restart, whatever --reset-position-ids says."""

    eod_mask_loss: bool = False
    """No loss for what follows an end-of-document token: the next document's first token (Megatron's name)."""

    packing: Literal["concatenate", "best_fit"] = "concatenate"
    """"concatenate": training samples are cut from documents that follow one another. "best_fit", of shards: documents
    that fit into a sample stay whole (arXiv:2404.10830), and its rest is padding without a loss."""

    transform: str | None = None
    """Your own function of each training sample's tokens, by import path: "module:function" (docs/data.md)."""

    fim_rate: float = 0.0
    """Probability that a document of a sample becomes a fill-in-the-middle example (Megatron's --fim-data). 0: off."""

    fim_spm_rate: float = 0.5
    """Probability that such an example has its suffix first (SPM) and not its prefix (PSM)."""

    fim_split_sample: str | None = None
    """Token that cuts a document into fragments, as a repository into files; each becomes an example by itself."""

    fim_fragment_rate: float | None = None
    """With fim_split_sample: probability that a fragment of a document that fim_rate has taken becomes an example."""

    fim_no_prefix: str | None = None
    """Text; what begins with it stays as it is."""

    fim_prefix_token: str = "<fim_prefix>"
    """Control token before a prefix; as the next ones, by its text in the tokenizer."""

    fim_middle_token: str = "<fim_middle>"
    """Before a middle."""

    fim_suffix_token: str = "<fim_suffix>"
    """Before a suffix."""

    fim_pad_token: str = "<fim_pad>"
    """Fills a sample that has become shorter; without a loss."""

    @property
    def shaping(self) -> dict[str, str]:
        """What becomes of the text on its way into samples; another is another data."""
        names = [one.name for one in fields(self) if one.name.startswith("fim_")] if self.fim_rate else []
        fim = ", ".join(f"{name} {getattr(self, name)}" for name in names if getattr(self, name) is not None) or "none"
        return {"packing": self.packing, "transform": self.transform or "none", "fim": fim}

    @property
    def by_document(self) -> bool:
        """Whether layers compute with where documents start."""
        return self.reset_attention_mask or self.reset_position_ids

    @property
    def restarts_alone(self) -> bool:
        """Whether positions restart though documents see one another."""
        return self.reset_position_ids and not self.reset_attention_mask

    @property
    def streamed(self) -> tuple[str, ...]:
        """What is tokenised while training goes on."""
        return self.stream or tuple(self.stream_blend)

    @property
    def streamed_by(self) -> str:
        """The field that names it."""
        return "data.stream" if self.stream else "data.stream_blend"

    def problems(self) -> list[str]:
        """What cannot work whatever the files hold, one message each."""
        found = split_problems(self.split)
        if not 512 <= self.builtin_vocab_size <= 32768:
            found.append(
                f"data.builtin_vocab_size = {self.builtin_vocab_size}: expected 512 to 32768 "
                "(256 bytes, 3 control pieces and the alphabet come first; the corpus is small)."
            )
        for name in ("tokenizer", "jsonl_key", "csv_column"):
            if getattr(self, name) == "":
                found.append(f"data.{name} is empty; leave it out to use its default.")
        if self.bucket_cache_gb <= 0:
            found.append(f"data.bucket_cache_gb must be above 0, found {self.bucket_cache_gb}.")
        found += blend_problems(self)
        found += stream_problems(self)
        found += number_ranges.problems("data.samples_to_skip", self.samples_to_skip, 0)
        if self.samples_to_skip and self.order == "megatron":
            no_more = 'data.samples_to_skip: data.order = "megatron" has no samples to take instead.'
            found.append(f"{no_more} Use train.iterations_to_skip, whose updates are skipped.")
        found += fim_problems(self)
        if self.packing == "best_fit" and (self.streamed or self.order == "megatron"):
            found.append(
                'data.packing = "best_fit" packs shards, whose lengths are known, in data.order "exact", and neither '
                'streams nor data.order = "megatron". Name shards in data.paths, or leave data.packing out.'
            )
        if not all(self.paths):
            found.append("data.paths holds an empty string; name a file, or leave data.paths out.")
        return found


def path_of(name: str | Path) -> Path:
    """What a name stands for, with ~ as a home folder; where there is no such user, the name as it is."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def split_weights(split: str) -> tuple[float, float, float]:
    """Weights of (train, validation, test), as given; missing ones are 0.

    Raises ValueError where `split` is not one to three comma-separated numbers.
    """
    weights = [float(part) for part in split.split(",")]
    if len(weights) > 3:
        raise ValueError(f"{len(weights)} weights")
    train, validation, test = weights + [0.0] * (3 - len(weights))
    return train, validation, test


def split_problems(split: str) -> list[str]:
    """What is wrong with `data.split`."""
    try:
        weights = split_weights(split)
    except ValueError:
        weights = (-1.0, -1.0, -1.0)
    if all(0 <= weight < float("inf") for weight in weights) and weights[0] > 0:
        return []
    return [
        f'data.split = "{split}": expected up to three numbers >= 0 with commas between, the weights of '
        'train, validation and test, the first above 0; for example "969,30,1".'
    ]


def blend_problems(config: DataConfig) -> list[str]:
    """What is wrong with the sources of a blend."""
    given = [name for name in TEXTS if getattr(config, name)]
    found = []
    if len(given) > 1:
        found.append(f"{' and '.join(f'data.{name}' for name in given)} each say what to train on; give one of them.")
    for field_name, weights in (("blend", config.blend), ("stream_blend", config.stream_blend)):
        for name, weight in weights.items():
            if not (name and weight > 0 and math.isfinite(weight)):
                found.append(f'data.{field_name}: "{name}" = {weight}: expected a source and a weight above 0.')
    if len(config.blend) > MOST_SOURCES:
        found.append(f"data.blend has {len(config.blend)} sources; at most {MOST_SOURCES} fit its table.")
    return found


def stream_problems(config: DataConfig) -> list[str]:
    """What is wrong with streaming, and what cannot go with it."""
    found = []
    if not 1 <= config.stream_count <= MOST_STREAMS:
        found.append(f"data.stream_count = {config.stream_count}: expected 1 to {MOST_STREAMS}.")
    for name in ("max_document_mb", "max_expansion"):
        if getattr(config, name) <= 0:
            found.append(f"data.{name} must be above 0, found {getattr(config, name)}.")
    if config.stream_shuffle < 0:
        found.append(f"data.stream_shuffle = {config.stream_shuffle}: expected 0 (as documents stand) or more.")
    if not config.streamed:
        return found
    by = config.streamed_by
    if (total := len(config.stream_blend) * config.stream_count) > MOST_CURSORS:
        found.append(
            f"data.stream_blend: {len(config.stream_blend)} sources of data.stream_count = {config.stream_count} "
            f"streams are {total:,}; at most {MOST_CURSORS:,}, each of which has its place in every checkpoint."
        )
    if not all(config.stream):
        found.append("data.stream holds an empty string; name a file, or leave data.stream out.")
    if config.order == "megatron":
        found.append(
            f'data.order = "megatron" orders the samples of shards, and {by} has none. Make shards with '
            'tools.preprocess and name them in data.paths, or leave data.order at "exact".'
        )
    if config.require_manifest:
        found.append(
            f"data.require_manifest asks for the manifests of shards, and {by} has none. Leave one of them out."
        )
    return found


def fim_problems(config: DataConfig) -> list[str]:
    """What is wrong with fill-in-the-middle."""
    found = [
        f"data.{name} = {getattr(config, name)}: expected a probability from 0 to 1."
        for name in ("fim_rate", "fim_spm_rate", "fim_fragment_rate")
        if not 0 <= (getattr(config, name) or 0.0) <= 1
    ]
    if config.fim_split_sample is not None and config.fim_fragment_rate is None:
        found.append("data.fim_split_sample needs data.fim_fragment_rate: how many of its fragments become examples.")
    return found
