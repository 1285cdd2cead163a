"""What preprocessing is asked for: the flags of the command, their checks, and what follows from them."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import tyro

from data.config import path_of
from data.raw.reading import ReadOptions
from data.tokenizers.engines import EngineName
from program.buckets.names import is_url
from program.errors import UserError
from program.schema import text_problem
from tools.preprocess.encoding import SpecialText
from tools.preprocess.output import ArrayShare, Output


def check_names(jsonl_key: str, csv_column: str | None) -> None:
    """Raises UserError for what cannot be the name of a field or column."""
    for flag, name in (("--jsonl_key", jsonl_key), ("--csv_column", csv_column)):
        problem = None if name is None else text_problem(name) or ("" if name else "nothing")
        if problem:
            raise UserError(f"{flag} {name!r}: expected the name of a field, found {problem}.")


@dataclass(kw_only=True)
class PreprocessOptions:
    """Text to token shards, which training opens as data.paths = [PREFIX]."""

    input: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="INPUT ...")]
    """Files, folders, globs, or Hugging Face datasets as hf://OWNER/NAME[:CONFIGURATION][@SPLIT][#REVISION]. Without a
    revision, the newest; the work records it, and refuses to continue with another."""
    output: str
    """Prefix of the shards PREFIX-00000-of-00012.bin, .idx and .json; also s3://BUCKET/PREFIX."""
    work_dir: Path | None = None
    """Where shards for a bucket are made, in a folder of its own, which is removed when they are in the bucket; it has
    room for all of them. None: the user's cache folder."""
    tokenizer: str
    """SentencePiece or Llama .model, tokenizer.json, vocab.json beside its merges.txt (or both, with a comma between),
    .tiktoken, a folder with one of these, or "byte". `python -m tools.preprocess train` makes a .model of your text."""
    eod_token: str | None = None
    """End-of-document token, if tokenizer.json does not name one."""
    workers: int = 0
    """Processes; 0: one per CPU. The output is the same for any number."""
    engine: EngineName = "auto"
    """The encoder. auto: the one that began this output, else the fastest with the tokenizer's ids on a sample."""
    special_tokens: SpecialText = "plain"
    """Text like "<|endoftext|>" in a document: stays text, becomes the control id (as in Megatron's preprocessing),
    or makes the document a bad one. Always counted."""
    append_eod: bool = True
    """End each document with the end-of-document id (Megatron's --append-eod)."""
    jsonl_key: str = "text"
    """Field of a line, or column, that holds the document; doc.text is the field text of doc."""
    csv_column: str | None = None
    """Column of .csv and .tsv files that holds the document, by its name in the header; None: the --jsonl_key, and
    folders are read without such files."""
    on_bad_document: Literal["stop", "skip"] = "stop"
    """A line that is not JSON, not UTF-8 or lacks the field: stop there, or skip and count it."""
    merge: bool = False
    """Join the shards into PREFIX_text_document.bin/.idx (text: the --jsonl_key), as Megatron's preprocessing
    names it."""
    shuffle_docs: int | None = None
    """Seed: shuffle the documents over all shards."""
    unit_mb: float | None = None
    """Input for one shard, 10^6 bytes; a kill loses the shards in work. None: by the size of all inputs."""
    part: str | None = None
    """I/N: make only every N-th shard, from the I-th on; for the tasks of a SLURM array."""
    max_document_mb: float = 64.0
    """A longer document is a bad one."""
    max_expansion: float = 200.0
    """Bytes that one byte of a compressed file may unpack to, over the whole file."""
    check_space: bool = True
    """Estimate the output's size, and refuse to start if the disk has too little room."""
    overwrite: bool = False
    """Remove the existing files of PREFIX first; not with --part, where it would remove the other parts' work."""

    @property
    def prefix(self) -> Path:
        """Of shards on a disk."""
        return path_of(self.output).absolute()

    @property
    def reading(self) -> ReadOptions:
        """How documents are read."""
        return ReadOptions(
            jsonl_key=self.jsonl_key,
            csv_column=self.csv_column,
            on_bad_document=self.on_bad_document,
            max_document_bytes=int(self.max_document_mb * 1e6),
            max_expansion=self.max_expansion,
        )

    @cached_property
    def share(self) -> ArrayShare:
        """Of the units. Raises UserError for what ``part`` cannot be."""
        return ArrayShare.parse(self.part)

    def check(self) -> None:
        """Raises UserError for what cannot be, whatever the inputs hold."""
        if not self.input:
            raise UserError("name at least one INPUT.")
        check_names(self.jsonl_key, self.csv_column)
        if self.merge and "/" in self.jsonl_key:
            raise UserError(
                f"--jsonl_key {self.jsonl_key!r} with --merge: part of the joined file's name, which cannot hold it. "
                "Leave --merge out, or rename the field."
            )
        if self.workers < 0:
            raise UserError(f"--workers {self.workers}: expected 1 or more, or 0 for one for each CPU.")
        for name in ("unit_mb", "max_document_mb", "max_expansion"):
            value = getattr(self, name)
            if value is not None and not 1e-6 <= value < float("inf"):
                raise UserError(f"--{name} {value}: expected a number above 0.")
        self._check_overwrite()
        if self.share.count > 1 and is_url(self.output):
            raise UserError(
                "--part with --output in a bucket: expected one of the two. Let the parts write to a disk that they "
                "share, and copy the shards up when all are done, the .json files last."
            )
        if not is_url(self.output) and self.work_dir is not None:
            raise UserError("--work_dir: where shards for a bucket are made, and --output is on a disk. Leave it out.")
        if self.output.endswith("/") or not self.output or path_of(self.output).is_dir():
            raise UserError(
                f"--output {self.output}: is a folder; give the beginning of file names, {self.output}/NAME."
            )

    def _check_overwrite(self) -> None:
        """Parts start one by one: each would remove what the others have done, and none would be the last."""
        if self.share.count > 1 and self.overwrite:
            way = Output(self.prefix).way_to_clear(self.jsonl_key)
            raise UserError(
                f"--overwrite with --part {self.part}: would remove the finished shards of the other parts; expected "
                f"one of the two. {way} Or leave --part out: one command clears and does all units."
            )
