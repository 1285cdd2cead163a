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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from program import command
from program.buckets.names import is_url
from program.errors import UserError
from program.flags import parse_flags
from tools.preprocess import run, to_bucket, training, verify
from tools.preprocess.options import PreprocessOptions, check_names
from tools.preprocess.worker_pool import Stopped, StopSign, WorkerDied

STOPPED = 75


@dataclass(kw_only=True)
class Preprocess(PreprocessOptions):
    """Text to token shards, which training opens as data.paths = [PREFIX]."""

    def run(self) -> int:
        """The exit code. Raises UserError, Stopped."""
        self.check()
        stop = StopSign()
        stop.listen()
        if is_url(self.output):
            to_bucket.make(self, lambda prefix: run.preprocess(replace(self, output=str(prefix)), stop))
        else:
            run.preprocess(self, stop)
        return 0


@dataclass(kw_only=True)
class Verify:
    """Compare every byte of shards with their manifests; name file and range of what differs, and what is lost."""

    path: Annotated[str, tyro.conf.Positional]
    """A prefix, one shard, or a folder of shards; s3://BUCKET/PREFIX is read shard by shard by way of a disk."""

    def run(self) -> int:
        """1 where something is damaged or lost. Raises UserError."""
        found = verify.verify(self.path)
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
    except (UserError, WorkerDied) as error:
        print(f"preprocess: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except OSError as error:  # a disk or a name that no step expected
        if not error.filename:
            raise
        print(f"preprocess: {error.filename}: {error.strerror}.", file=sys.stderr)
        return 2
    except (Stopped, KeyboardInterrupt):
        print("preprocess: stopped; the same command continues", file=sys.stderr)
        return STOPPED


if __name__ == "__main__":
    command.leave(command.run("tools.preprocess", main))  # at times a thread of pyarrow aborts an interpreter that ends
