"""Text to token shards.

    python -m tools.preprocess INPUT ... --output PREFIX --tokenizer PATH|byte
    python -m tools.preprocess verify PATH
    python -m tools.preprocess train INPUT ... --output tokenizer.model --vocab_size 32000

INPUT: .jsonl, .parquet, .csv, .tsv or text files, also as .gz, .zst, .bz2 or .xz; folders; globs; a Hugging Face
dataset (hf://OWNER/NAME, or a folder of save_to_disk); files, folders, globs and PREFIX also in a bucket
(s3://BUCKET/KEY). Started again with the same command after it was killed, it goes on where it was.
Exit code 0: done; 1: verify found damage or loss, or a worker died; 2: bad input; 75: ended by SIGTERM or Ctrl-C, to be
continued.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from data.config import path_of
from data.raw.reading import ReadOptions
from data.tokenizers.engines import EngineName
from program import command
from program.buckets.names import is_url
from program.errors import UserError
from program.flags import parse_flags
from program.schema import text_problem
from tools.preprocess import run, to_bucket, training, verify, verify_bucket
from tools.preprocess.encoding import SpecialText
from tools.preprocess.output import ArrayShare, Output
from tools.preprocess.run import PreprocessOptions
from tools.preprocess.worker_pool import Stopped, StopSign, WorkerDied

STOPPED = 75


def check_names(jsonl_key: str, csv_column: str | None) -> None:
    """Raises UserError for what cannot be the name of a field or column."""
    for flag, name in (("--jsonl_key", jsonl_key), ("--csv_column", csv_column)):
        problem = None if name is None else text_problem(name) or ("" if name else "nothing")
        if problem:
            raise UserError(f"{flag} {name!r}: expected the name of a field, found {problem}.")


@dataclass(kw_only=True)
class Preprocess:
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

    def run(self) -> int:
        """The exit code. Raises UserError, Stopped."""
        self._check()
        stop = StopSign()
        stop.listen()
        reading = ReadOptions(
            jsonl_key=self.jsonl_key,
            csv_column=self.csv_column,
            on_bad_document=self.on_bad_document,
            max_document_bytes=int(self.max_document_mb * 1e6),
            max_expansion=self.max_expansion,
        )

        def preprocess(prefix: Path) -> None:
            run.preprocess(self._options(prefix, reading, stop))

        if is_url(self.output):
            to_bucket.make(self.output, self.work_dir, self.overwrite, self.jsonl_key, preprocess)
        else:
            preprocess(path_of(self.output).absolute())
        return 0

    def _options(self, prefix: Path, reading: ReadOptions, stop: StopSign) -> PreprocessOptions:
        return PreprocessOptions(
            inputs=self.input,
            prefix=prefix,
            tokenizer=self.tokenizer,
            eod_token=self.eod_token,
            workers=self.workers or run.available_cpus(),
            reading=reading,
            engine=self.engine,
            special_text=self.special_tokens,
            append_eod=self.append_eod,
            merge=self.merge,
            shuffle_docs=self.shuffle_docs,
            unit_bytes=None if self.unit_mb is None else int(self.unit_mb * 1e6),
            part=ArrayShare.parse(self.part),
            overwrite=self.overwrite,
            check_space=self.check_space,
            stop=stop,
        )

    def _check(self) -> None:
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
        if is_url(self.output) and ArrayShare.parse(self.part).count > 1:
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
        if self.overwrite and ArrayShare.parse(self.part).count > 1:
            way = Output(path_of(self.output).absolute()).way_to_clear(self.jsonl_key)
            raise UserError(
                f"--overwrite with --part {self.part}: would remove the finished shards of the other parts; expected "
                f"one of the two. {way} Or leave --part out: one command clears and does all units."
            )


@dataclass(kw_only=True)
class Verify:
    """Compare every byte of shards with their manifests; name file and range of what differs, and what is lost."""

    path: Annotated[str, tyro.conf.Positional]
    """A prefix, one shard, or a folder of shards; s3://BUCKET/PREFIX is read shard by shard by way of a disk."""

    def run(self) -> int:
        """1 where something is damaged or lost. Raises UserError."""
        found = verify_bucket.verify(self.path) if is_url(self.path) else verify.verify(path_of(self.path))
        if not found:
            print(f"good: {self.path}")
            return 0
        print(*(one.what for one in found), f"DAMAGED: {len(found)} finding(s)", verify.how_to_fix(found), sep="\n")
        return 1


@dataclass(kw_only=True)
class Train:
    """Train a SentencePiece model on documents."""

    input: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="INPUT ...")]
    """As for preprocessing."""
    output: Path
    """The .model file to write."""
    vocab_size: int = 32000
    """Pieces."""
    jsonl_key: str = "text"
    """Field of a line, or column, that holds the document."""
    csv_column: str | None = None
    """As for preprocessing."""
    sample_mb: float = 100.0
    """Text to train on, in 10^6 bytes, taken evenly from the inputs."""

    def run(self) -> int:
        """The exit code. Raises UserError."""
        if not 1e-6 <= self.sample_mb < float("inf"):
            raise UserError(f"--sample_mb {self.sample_mb}: expected a number above 0.")
        if self.vocab_size < 1:
            raise UserError(f"--vocab_size {self.vocab_size}: expected a number above 0.")
        check_names(self.jsonl_key, self.csv_column)
        reading = training.read_options(self.jsonl_key, self.csv_column)
        training.train(self.input, self.output, self.vocab_size, reading, int(self.sample_mb * 1e6))
        return 0


COMMANDS: dict[str, Any] = {"verify": Verify, "train": Train}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    command = COMMANDS.get(given[0]) if given else None
    program = "python -m tools.preprocess"
    if command:
        asked = parse_flags(command, given[1:], f"{program} {given[0]}")
    else:
        asked = parse_flags(Preprocess, given, program, __doc__)
    try:
        return int(asked.run())
    except UserError as error:
        print(f"preprocess: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # a disk or a name that no step expected
        if not error.filename:
            raise
        print(f"preprocess: {error.filename}: {error.strerror}.", file=sys.stderr)
        return 2
    except WorkerDied as error:
        print(f"preprocess: {error}", file=sys.stderr)
        return 1
    except (Stopped, KeyboardInterrupt):
        print("preprocess: stopped; the same command continues", file=sys.stderr)
        return STOPPED


if __name__ == "__main__":
    command.leave(command.run("tools.preprocess", main))  # at times a thread of pyarrow aborts an interpreter that ends
