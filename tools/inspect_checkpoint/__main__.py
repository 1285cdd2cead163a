"""What is in a checkpoint, whether it is whole, and how it differs from another.

    python -m tools.inspect_checkpoint CHECKPOINT                      layers, shapes, bytes
    python -m tools.inspect_checkpoint RUN_DIR --list                  the checkpoints of a run
    python -m tools.inspect_checkpoint CHECKPOINT --verify hashes      every byte against the manifest
    python -m tools.inspect_checkpoint CHECKPOINT --tensor "layers.0.*"    minimum, maximum, mean, norm, NaNs
    python -m tools.inspect_checkpoint CHECKPOINT --diff OTHER         tensor by tensor, field by field
    python -m tools.inspect_checkpoint average TARGET CHECKPOINT CHECKPOINT ...

CHECKPOINT is a checkpoint, a folder of them or a run's folder; of several the latest is taken. Nothing of it is
executed and nothing is changed. Exit code 0: as it should be, or no difference; 1: damaged, or different; 2: bad input.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from program import command, printing
from program.errors import UserError, printable
from program.flags import at_least_one, parse_flags
from tools.inspect_checkpoint import average, catalogue, compare, numbers, tree
from tools.inspect_checkpoint.contents import parameters
from tools.inspect_checkpoint.text import size
from tools.shared.bucket_paths import here
from tools.shared.held_checkpoint import deleted_is_said, find
from training.checkpoint.format.manifest import DamagedError
from training.checkpoint.format.reader import FileReader
from training.checkpoint.format.verify import Depth, strangers


@dataclass(kw_only=True)
class Inspect:
    """Print what a checkpoint contains, verify it, or compare two."""

    checkpoint: tyro.conf.Positional[Path]
    """A checkpoint, a folder of them, or a run's folder; or its URL in a bucket, of which tensors are
    fetched where they are asked for."""
    list_only: Annotated[bool, tyro.conf.arg(name="list")] = False
    """Only list the checkpoints of the folder."""
    every_block: Annotated[bool, tyro.conf.arg(name="all")] = False
    """Show every block, also those that are alike."""
    verify: Depth | None = None
    """Compare all files with the manifest: by their sizes, or every byte."""
    tensor: str | None = None
    """Statistics of the tensors whose names match, as in "layers.*.linear_qkv.weight"."""
    diff: Path | None = None
    """Another checkpoint to compare with."""
    top: int = 20
    """Differences shown, the largest first."""
    json: bool = False
    """Print JSON; NaN and infinity become null."""

    def run(self) -> int:
        """The exit code. Raises UserError, DamagedError."""
        self._check()
        tensors = bool(self.verify == "hashes" or self.tensor or self.diff)
        return dataclasses.replace(self, checkpoint=here(self.checkpoint, tensors=tensors))._run()

    def _run(self) -> int:
        root = catalogue.root_of(self.checkpoint)
        found = catalogue.catalogue(root) if root else []
        if self.list_only:
            found = found or [catalogue.read(find(self.checkpoint))]
            self._print(catalogue.listed(found), [one.to_json() for one in found])
            return 0
        path = find(self.checkpoint)
        other = find(self.diff) if self.diff else path
        with deleted_is_said(path, other):
            if self.verify:
                return self._verify(path)
            if self.tensor:
                return self._statistics(path, self.tensor)
            if self.diff:
                return self._compare(path, other)
            return self._details(path, found)

    def _check(self) -> None:
        asked = {"--list": self.list_only, "--verify": self.verify, "--tensor": self.tensor, "--diff": self.diff}
        if len(given := [flag for flag, value in asked.items() if value]) > 1:
            raise UserError(f"{' and '.join(given)}: each is an answer by itself. Ask for one at a time.")
        if self.top < 1:
            raise UserError(f"--top {self.top}: expected 1 or more.")

    def _details(self, path: Path, found: Sequence[catalogue.Checkpoint]) -> int:
        own = next((one for one in found if one.path == path), None) or catalogue.read(path)
        with FileReader(path) as reader:
            tensors = parameters(reader.tensors)
        listed = [*catalogue.listed(found), ""] if found else []
        text = [*listed, *tree.head(own, tensors), "", *tree.tree(tensors, fold=not self.every_block)]
        record = {**own.to_json(), "checkpoints": [one.to_json() for one in found], "tensors": tree.to_json(tensors)}
        self._print(text, record)
        return 1 if own.status == "damaged" else 0

    def _verify(self, path: Path) -> int:
        depth: Depth = self.verify or "hashes"
        found = catalogue.check(path, depth)
        own = catalogue.read(path)
        good = f"good: {path}: {own.files:,} files, {size(own.bytes)}, are what was written ({depth})"
        bad = [*(damage.text for damage in found), f"DAMAGED: {path}: {len(found):,} of {own.files:,} files"]
        try:
            others = strangers(path)
        except DamagedError:  # no manifest, which is reported above
            others = []
        unknown = [f"{path / name}: not in the manifest, and not read" for name in others]
        record: dict[str, Any] = {"path": str(path), "depth": depth, "damages": [damage._asdict() for damage in found]}
        self._print([*(bad if found else [good]), *unknown], record | {"unknown_files": others})
        return 1 if found else 0

    def _statistics(self, path: Path, pattern: str) -> int:
        with FileReader(path) as reader:
            chosen = numbers.matching(parameters(reader.tensors), pattern, path)
            with catalogue.bar(sum(stored.bytes for _, stored in chosen), "reading") as bar:
                found = []
                for name, stored in chosen:
                    found.append((name, stored, numbers.statistics(reader, stored)))
                    bar.update(stored.bytes)
        self._print(numbers.table(found), [numbers.to_json(*one) for one in found])
        return 0

    def _compare(self, path: Path, other: Path) -> int:
        with FileReader(path) as one, FileReader(other) as two:
            pairs = compare.pairs(parameters(one.tensors), parameters(two.tensors))
            total = sum(max(side.bytes if side else 0 for side in pair[2:]) for pair in pairs)
            with catalogue.bar(total, "comparing") as bar:
                tensors = compare.compare(pairs, one, two, bar.update)
        found = compare.differing(catalogue.read(path), catalogue.read(other))
        same = compare.is_same(tensors, found)
        record = {
            "first": str(path),
            "second": str(other),
            "same": same,
            "fields": [{"name": field.name, "first": field.first, "second": field.second} for field in found],
            "tensors": [tensor.to_json() for tensor in tensors],
        }
        self._print(compare.report(path, other, tensors, found, self.top), record)
        return 0 if same else 1

    def _print(self, lines: Sequence[str], record: Any) -> None:
        print(json.dumps(record, indent=1, default=str) if self.json else printable("\n".join(lines)))


@dataclass(kw_only=True)
class Average:
    """The mean of several checkpoints' weights, fp32, as a checkpoint of weights alone.

    Train on from it with --checkpoint.load TARGET --checkpoint.finetune, or export it with tools.convert. Masters are
    averaged where there are any. Configuration, state and tokenizer are the last one's.
    """

    target: tyro.conf.Positional[Path]
    """Folder to write; must not exist."""
    checkpoints: tyro.conf.Positional[tuple[Path, ...]]
    """Two or more; of a folder of several the latest is taken."""
    weights: tuple[float, ...] | None = None
    """One number for each checkpoint, in any unit. None: all count alike."""
    workers: int = 1
    """Processes; each needs about 0.5 GB."""

    def run(self) -> int:
        """The exit code. Raises UserError, DamagedError."""
        if len(self.checkpoints) < 2:
            raise UserError(f"average: expected TARGET and two or more checkpoints; found {len(self.checkpoints)}.")
        sources = [find(path) for path in self.checkpoints]
        with deleted_is_said(*sources):
            average.average(sources, self.target, self.weights, at_least_one(self.workers))
        print(f"wrote {self.target}: the mean of {', '.join(str(source) for source in sources)}")
        return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: good, the same, done; 1: damaged, different; 2: bad input."""
    given = list(sys.argv[1:] if argv is None else argv)
    job: Inspect | Average
    if given[:1] == ["average"]:  # a checkpoint of this name is ./average
        job = parse_flags(Average, given[1:], "python -m tools.inspect_checkpoint average")
    else:
        job = parse_flags(Inspect, given, "python -m tools.inspect_checkpoint", __doc__)
    code = 0
    try:
        with printing.for_a_reader():
            code = job.run()
    except UserError as error:
        print(f"tools.inspect_checkpoint: {error}", file=sys.stderr)
        return 2
    except DamagedError as error:
        print(f"tools.inspect_checkpoint: damaged: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        command.os_error("tools.inspect_checkpoint", error)
        return 2
    return code


if __name__ == "__main__":
    raise SystemExit(command.run("tools.inspect_checkpoint", main))
