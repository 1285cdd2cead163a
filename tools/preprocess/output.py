"""Where the shards go, who may write there, and what of an earlier run may be continued."""

import contextlib
import errno
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.inputs import PLAN_BYTES, empty_path, joined, numbered, planned_keys, work_folder
from data.manifest import ShardManifest, manifest_path, read_manifest
from data.shards import bin_path, idx_path
from program.durable import replace_file
from program.errors import UserError
from program.locks import locked
from program.schema import JSON, Count
from program.untrusted import InputError, parse_json, read_bytes
from tools.shared.written import check_place

LEFTOVER = re.compile(r"-(\d{5,})(?:-of-\d{5,})?\.[\w.]+\.tmp-")
ENDS = re.compile(r", ends [0-9a-f]+\)$")
"""How the line of an input ends in a plan."""
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
GRACE_S = 5.0
"""How long a start waits for the processes of a run that was killed a moment ago."""


@dataclass(frozen=True, slots=True)
class ArrayShare:
    """One of several runs that share the units, as the tasks of a SLURM array do."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str | None) -> "ArrayShare":
        """`I/N`, I from 0. Raises UserError."""
        if text is None:
            return cls()
        matched = re.fullmatch(r"(\d+)/(\d+)", text)
        if not matched or int(matched[1]) >= int(matched[2]):
            raise UserError(f"--part {text}: expected I/N with I from 0 to N - 1, for example 0/4.")
        return cls(int(matched[1]), int(matched[2]))


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is read of a plan's entries one by one; earlier versions did not write all."""

    jsonl_key: str
    inputs: tuple[str, ...]
    merge: bool = False
    engine: str | None = None
    max_document_bytes: Count = 0


@dataclass(frozen=True, slots=True)
class Output:
    """`PREFIX-00000-of-00012.bin/.idx/.json`, and beside them the folder `PREFIX.preprocess` of the work itself."""

    prefix: Path

    @property
    def folder(self) -> Path:
        """The plan, locks, and what is not finished yet."""
        return work_folder(self.prefix)

    def shard(self, index: int, count: int) -> Path:
        """Prefix of a shard that is a result."""
        return numbered(self.prefix, index, count)

    def kept(self, stage: str, index: int, count: int) -> Path:
        """Prefix of a shard that a later stage takes up."""
        return numbered(self.folder / stage, index, count)

    def hashes(self, index: int) -> Path:
        """Hashes of a unit's documents, uint64."""
        return self.folder / f"hashes-{index:05d}.bin"

    @property
    def totals(self) -> Path:
        """What all units together hold, once they are complete."""
        return self.folder / "totals.json"

    @contextlib.contextmanager
    def claimed(self, part: ArrayShare) -> Iterator[list[int] | None]:
        """The right to write this part's units: open files that hold it, which no worker may keep; None where the file
        system has no locks, which would keep others out.

        Raises UserError where another process has it, or works with another number of parts, or where --output
        cannot be a folder's.
        """
        self._make_folder()
        with contextlib.ExitStack() as stack:
            own = self.folder / f"part-{part.index}-of-{part.count}.lock"
            held = [_claimed(stack, own, self.prefix)]
            # Looked for behind that: of two that begin at once, one at least sees the other.
            others = [one for one in self.folder.glob("part-*.lock") if not one.name.endswith(f"-of-{part.count}.lock")]
            held += [_claimed(stack, path, self.prefix) for path in sorted(others)]
            yield None if None in held else [one for one in held if one is not None]

    @contextlib.contextmanager
    def finishing(self) -> Iterator[list[int] | None]:
        """The right to do what follows when all parts are done, held as ``claimed`` does; None where another process is
        doing it.

        Where the file system has no locks, it is everybody's.
        """
        with contextlib.ExitStack() as stack:
            try:
                held = stack.enter_context(locked(self.folder / "finish.lock", wait=False))
            except BlockingIOError:
                yield None
            else:
                yield [] if held is None else [held]

    def way_to_clear(self, key: str) -> str:
        """What to do where parts shall start over: no part may clear, as it cannot know whether others have begun.

        key: the field of the documents, by which joined shards are named.
        """
        name = self.prefix.name
        return (
            f"To start parts over, remove once, before any of them starts, what is there: {name}.preprocess, "
            f"{name}-[0-9]*-of-* and {name}_{key}_document.* in {self.prefix.parent}."
        )

    def agree(self, plan: dict[str, Any], overwrite: bool, part: ArrayShare, alone: bool) -> None:
        """Continue the plan that is there, or make this one the plan; its engine is agreed on when it is chosen.

        part: whose messages it is for. alone: no other process can be at work on the plan that is there. Raises
        UserError with the differences where another plan is there of which something is made, or shards that belong to
        none.
        """
        with locked(self.folder / "plan.lock"):  # parts that start at once read and write it one after another
            if overwrite:
                self._clear(str(plan["jsonl_key"]))
            if before := self._plan():
                engine = {"engine": before.pop("engine")} if "engine" in before else {}
                plan = _as_written_before(plan, before)
                if before != plan and alone and not self._is_begun(before):
                    self._write_plan(plan)
                elif _forgives_more(before, plan):
                    self._write_plan(plan | engine)
                else:
                    self._refuse(differences(before, plan), plan, part)
                return
            if strangers := self._shards(str(plan["jsonl_key"])):
                way = "Or move it away." if overwrite else self._way_anew(plan, part)
                raise UserError(
                    f"--output {self.prefix}: {strangers[0].name} is already there, and no plan that it belongs to. "
                    f"Give another --output. {way}"
                )
            self._write_plan(plan)

    def _is_begun(self, plan: dict[str, Any]) -> bool:
        """Whether anything whole is there that was made of a plan."""
        made = (path for path in self.folder.iterdir() if path.suffix != ".lock" and ".tmp-" not in path.name)
        return any(path.name != "plan.json" for path in made) or bool(self._shards(str(plan.get("jsonl_key"))))

    def engine(self) -> str | None:
        """What encodes, of the plan that is there; None before it is chosen, and of plans of earlier versions."""
        found = self._plan().get("engine")
        return None if found is None else str(found)

    def agree_engine(self, name: str, part: ArrayShare) -> None:
        """Make this the engine of the plan that is there: engines are proven equal on a sample only.

        Raises UserError where the plan has another one.
        """
        with locked(self.folder / "plan.lock"):
            plan = self._plan()
            self._refuse(differences({"engine": plan.get("engine", name)}, {"engine": name}), plan, part)
            if "engine" not in plan:
                self._write_plan({**plan, "engine": name})

    def unusable_engine(self, error: UserError, part: ArrayShare) -> UserError:
        """For the engine of the plan that is there, which cannot be used here."""
        plan = self._plan()
        return UserError(
            f"--output {self.prefix}: its shards are made by engine {plan['engine']}; expected the same here, since "
            f"another one's ids may differ somewhere. {error} Make it usable here, or give another --output. "
            f"{self._way_anew(plan, part)}"
        )

    def remove_leftovers(self, part: ArrayShare) -> None:
        """What killed processes had not finished of this part's units; where it is the only part, of anything."""
        named = self._named(*planned_keys(self.prefix))
        for folder in (self.prefix.parent, self.folder):
            for path in folder.iterdir():
                is_ours = folder == self.folder or named.match(path.name)
                if is_ours and ".tmp-" in path.name and path.is_file():
                    unit = LEFTOVER.search(path.name)
                    if part.count == 1 or (unit and int(unit[1]) % part.count == part.index):
                        path.unlink(missing_ok=True)

    def clear_unfinished(self, unfinished: dict[int, int], prefix: Callable[[int], Path]) -> None:
        """Delete what processes that are gone had not finished, and shards that only some files had got the names of.

        unfinished: process ids, and what number each worked on. A process id alone would not say it: on another node
        another part's process may have the same. prefix: of the shard of a number.
        """
        begun = [(path, process) for process, number in unfinished.items() for path in shard_files(prefix(number))]
        begun += [(self.hashes(number), process) for process, number in unfinished.items()]
        unnamed = {f"{path}.tmp-{process}" for path, process in begun}
        for folder in {path.parent for path, _ in begun}:
            for entry in folder.iterdir():
                whole, mark, maker = entry.name.partition(".tmp-")
                if f"{folder}/{whole}{mark}{maker.partition('-')[0]}" in unnamed:
                    entry.unlink(missing_ok=True)
        for torn in filter(lambda one: not is_complete(one), map(prefix, unfinished.values())):
            remove(torn)

    def _make_folder(self) -> None:
        check_place(self.folder, "--output")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            there = next(one for one in (self.folder, *self.folder.parents) if os.path.lexists(one))
            raise UserError(
                f"--output {self.prefix}: {there} is a file, expected a folder. Give another --output, or move that "
                "file away."
            ) from None

    def _plan(self) -> dict[str, Any]:
        """The one that is there; empty where none is. Raises UserError where it cannot be read."""
        path = self.folder / "plan.json"
        try:
            data = read_bytes(path, PLAN_BYTES)
            parse_json(data, _Plan, path)
            return dict(parse_json(data, dict[str, JSON], path))
        except FileNotFoundError:
            return {}
        except InputError as error:
            raise UserError(
                f"--output {self.prefix}: {path} cannot be read, expected the plan of the work: {error.problem} It is "
                "damaged, so that nothing says what the shards there were made of. Give another --output. To start "
                "over, give --overwrite, without --part."
            ) from None

    def _write_plan(self, plan: dict[str, Any]) -> None:
        write_whole(self.folder / "plan.json", json.dumps(plan, indent=1).encode())

    def _refuse(self, changed: list[str], plan: dict[str, Any], part: ArrayShare) -> None:
        """Raises UserError where something of a plan has changed."""
        if changed:
            raise UserError(
                f"--output {self.prefix}: there is the work of another command:\n"
                + "\n".join(f"  {line}" for line in changed)
                + f"\nGive that command to continue it, or another --output. {self._way_anew(plan, part)}"
            )

    def _way_anew(self, plan: dict[str, Any], part: ArrayShare) -> str:
        return self.way_to_clear(str(plan["jsonl_key"])) if part.count > 1 else "To start over, give --overwrite."

    def _shards(self, key: str) -> list[Path]:
        """This prefix's. key: the field of the documents; `web_en_text_document` is of `web_en`, whatever `web` is."""
        if not self.prefix.parent.is_dir():
            return []
        keys = key, *planned_keys(self.prefix)
        return sorted(path for path in self.prefix.parent.iterdir() if self.is_shard(path.name, *keys))

    def is_shard(self, name: str, *keys: str) -> bool:
        """Whether a file of this name is of a shard of this prefix. keys: fields of the documents, where joined."""
        found = self._named(*keys).match(name)
        return found is not None and name[found.end() :] in (".bin", ".idx", ".json", ".empty.json")

    def _named(self, *keys: str) -> re.Pattern[str]:
        """How names of this prefix's shards begin, whole or not."""
        joined = "|".join(f"_{re.escape(key)}_document" for key in keys)
        return re.compile(
            rf"{re.escape(self.prefix.name)}(-\d{{5,}}-of-\d{{5,}}{'|' + joined if joined else ''})(?=\.)"
        )

    def _clear(self, key: str) -> None:
        own = {pair.name for pair in joined(self.prefix, (".bin", ".idx", ".json"))}
        for path in self._shards(key):
            if not path.stem.endswith("_document") or path.stem in own:  # else it may be a longer prefix's
                path.unlink(missing_ok=True)
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.suffix != ".lock":
                path.unlink()


def _claimed(stack: contextlib.ExitStack, path: Path, prefix: Path) -> int | None:
    deadline = time.monotonic() + GRACE_S
    while True:
        try:
            return stack.enter_context(locked(path, wait=False))
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise UserError(
                    f"--output {prefix}: another process writes there ({path.name}). Wait for it, or give another "
                    "--output; several at once share the work by --part I/N with one N."
                ) from None
            time.sleep(0.05)


def _as_written_before(plan: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """A plan as versions before 2026-11-23 wrote it, where the one before is theirs: they said nothing of the content
    of inputs."""
    if any(ENDS.search(one) for one in before["inputs"]):
        return plan
    return {**plan, "inputs": [ENDS.sub(")", one) for one in plan["inputs"]]}


def _forgives_more(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether a plan only bears documents at which the one before stopped: what is whole of that has none of them."""
    bears = ("on_bad_document", "max_document_bytes")
    same = all(before.get(key) == now.get(key) for key in {*before, *now}.difference(bears))
    longer = int(now["max_document_bytes"]) >= int(before.get("max_document_bytes", 0))
    return before != now and same and before.get("on_bad_document") == "stop" and longer


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What of a plan has changed, a line each."""
    lines = []
    for key in sorted({*before, *now}):
        old, new = before.get(key), now.get(key)
        if old == new:
            continue
        if isinstance(old, list) and isinstance(new, list):
            gone = [one for one in old if one not in new]
            come = [one for one in new if one not in old]
            shown = [*(f"- {one}" for one in gone[:3]), *(f"+ {one}" for one in come[:3])]
            lines.append(f"{key}: {len(gone)} gone or changed, {len(come)} new: {'  '.join(shown)}")
        else:
            lines.append(f"{key}: {old} there, {new} here")
    return lines


def write_whole(path: Path, data: bytes) -> None:
    """Replace a small file durably; ``clear_unfinished`` knows the name of what a killed process leaves."""
    replace_file(path, data, suffix=f".tmp-{os.getpid()}")


def shard_files(prefix: Path) -> tuple[Path, ...]:
    """All that a shard may have; its index first, so that a partial removal in this order leaves no shard."""
    return idx_path(prefix), manifest_path(prefix), bin_path(prefix), empty_path(prefix)


@contextlib.contextmanager
def saying_where_no_space_is(path: Path) -> Iterator[None]:
    """Raises UserError for a full disk. path: what is written within."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        raise UserError(
            f"{path.parent}: {error.strerror} while writing {path.name}. What has its name there is whole; make room, "
            "and give the same command again."
        ) from None


def is_complete(prefix: Path) -> bool:
    """Whether a shard, or the note that a unit held no document, is there. `.idx` comes last."""
    return empty_path(prefix).is_file() or all(
        path.is_file() for path in (idx_path(prefix), bin_path(prefix), manifest_path(prefix))
    )


COUNTS = ("text_bytes", "empty", "rejected", "special_text")
"""What the manifest of a unit counts."""


def read_unit(prefix: Path) -> ShardManifest:
    """The manifest of a complete unit, an empty one's too."""
    empty = empty_path(prefix)
    manifest = read_manifest(empty.with_name(empty.name.removesuffix(".json"))) or read_manifest(prefix)
    if manifest is None:
        raise UserError(f"{manifest_path(prefix)} was removed meanwhile. Give the same command again.")
    if lost := [name for name in COUNTS if name not in manifest.counts]:
        raise UserError(
            f"{manifest_path(prefix)} does not say {', '.join(lost)}: damaged. Remove the shard's files, and give the "
            "same command again."
        )
    return manifest


def remove(prefix: Path) -> None:
    """Delete a shard."""
    for path in shard_files(prefix):
        path.unlink(missing_ok=True)
