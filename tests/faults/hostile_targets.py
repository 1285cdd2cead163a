"""What is attacked: files of a scene, the command that reads them, and what must be as without the attack."""

import hashlib
import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults import hostile_scenes
from tests.faults.hostile_process import SCRIPT

Results = Callable[[Path, str], Mapping[str, object]]
"""(the folder behind the command, what it said) -> what must be as in an untouched folder."""


def nothing(folder: Path, said: str) -> Mapping[str, object]:
    """A command that only reads and answers."""
    return {}


@dataclass(frozen=True, kw_only=True)
class Target:
    """A row of the table."""

    name: str
    scene: str
    victims: tuple[str, ...] = ()
    """Globs of files, folders with a slash at the end; none: the words of the command themselves."""
    words: tuple[tuple[str, ...], ...]
    """The commands that read them, of which a case draws one."""
    results: Results = nothing
    signed: bool = False
    """Checkpoints get a manifest that fits what was changed, so that hashes are right and the content is wrong."""
    reads_all: bool = True
    """Whether a command that says nothing must have the untouched result; else its answer may be another one."""
    fine: tuple[int, ...] = (0,)
    """Exit codes of an answer."""
    refused: tuple[int, ...] = (2,)
    """Exit codes that refuse what is there."""
    honours: Callable[[Path, Path, str], str] | None = None
    """(changed file, folder, said) -> what of a valid file's values was ignored."""
    prepare: Callable[[Path], None] = lambda _: None
    """To the copy, before it is changed."""
    before: Callable[[], None] = lambda: None
    """In the process of the command."""
    weight: int = 4


# ---- results


def digest(path: Path) -> str:
    """Of a file's bytes; empty where there is none."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size > 1 << 27:
        return ""
    return hashlib.blake2b(path.read_bytes(), digest_size=12).hexdigest()


def run_results(folder: Path, said: str) -> Mapping[str, object]:
    """Where a run went on, its last losses, and the tensors of its last checkpoint."""
    start = re.search(r"at +iteration (\d+)", said)
    losses = dict(re.findall(r"^iteration +(\d+)/\d+ \| (loss \S+ \| norm \S+)", said, re.MULTILINE))
    last = sorted(folder.glob("run/checkpoints/iter_???????"))[-1:]
    tensors = [digest(path) for one in last for path in sorted(one.glob("rank_*.bin"))]
    return {"start": start and start[1], "last loss": losses.get("4"), "tensors": tensors}


def shard_results(pattern: str) -> Results:
    """The bytes of shards or of any other files."""

    def results(folder: Path, said: str) -> Mapping[str, object]:
        return {str(path.relative_to(folder)): digest(path) for path in sorted(folder.glob(pattern))}

    return results


def outcome_of_training(folder: Path, said: str) -> Mapping[str, object]:
    """Losses of the first iteration: what data was read."""
    return {"losses": re.findall(r"^iteration +\d+/\d+ \| (loss \S+)", said, re.MULTILINE)}


# ---- what was asked for and what was done


def flat(table: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` -> ``{"a.b": 1}``."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        inner = isinstance(value, dict) and key != "blend"
        found |= flat(value, f"{before}{key}.") if inner else {f"{before}{key}": value}
    return found


def ignored(wanted: Mapping[str, Any], effective: Mapping[str, Any]) -> str:
    """The first field that says something else than it was asked to."""
    left_out = ("run_dir", "dry_run", "world_size", "rank")
    for key, value in wanted.items():
        if key in left_out or value in ([], None):
            continue
        if key not in effective or effective[key] != value:
            return f"{key} = {str(value)[:60]!r} was asked for, {str(effective.get(key))[:60]!r} is in force"
    return ""


def recipe_in_force(path: Path, folder: Path, said: str) -> str:
    """Of a recipe that is valid TOML: what the effective configuration lacks."""
    try:
        wanted = flat(tomllib.loads(path.read_bytes().decode("utf-8-sig")))
    except (ValueError, OSError, RecursionError) as error:
        return f"it is no TOML ({str(error)[:80]}), and was accepted"
    kept = folder / "run/config.toml"
    try:
        text = kept.read_text() if kept.exists() else said[said.index("run_dir = ") :]
        return ignored(wanted, flat(tomllib.loads(text)))
    except ValueError as error:
        return f"the effective configuration is no TOML: {error}"


def documents_are_counted(path: Path, folder: Path, said: str) -> str:
    """Every line of a .jsonl is a document of the shards, or is counted as empty or rejected."""
    if path.suffix != ".jsonl":
        return ""
    lines = [line for line in path.read_bytes().split(b"\n") if line.strip()]
    counted = 0
    for name in folder.glob("out/*.json"):
        manifest = json.loads(name.read_bytes())
        counted += manifest["documents"] + sum(manifest["counts"].get(key, 0) for key in ("empty", "rejected"))
    return "" if counted == len(lines) else f"{len(lines)} lines, but {counted} documents are accounted for"


# ---- the targets


RESUME = (*hostile_scenes.RUN,)
CHECKPOINT = "run/checkpoints/iter_0000003"
FILES = tuple(f"{CHECKPOINT}/{name}" for name in ("*.json", "*.jsonl", "config.toml"))
OLDER = tuple(f"run/checkpoints/iter_0000002/{name}" for name in ("*.json", "config.toml"))
BESIDE = tuple(
    f"run/{name}"
    for name in (
        "config.toml", "metrics.jsonl", "skipped_samples.json", "done", "requeue", "attempts.jsonl",
        "watch/*/verdict.json", "logs/*", ".owner.released",
    )
)  # fmt: skip
FOLDERS = ("run/logs/", "run/watch/", "run/checkpoints/", "run/checkpoints/iter_0000002/", f"{CHECKPOINT}/")
POINTERS = ("run/checkpoints/latest", "run/checkpoints/latest_checkpointed_iteration.txt")
OWNERS = ("run/owner.json", "run/owner.after-*", "run/owner.*.heartbeat")
INSPECT = "tools.inspect_checkpoint"
PREPROCESS = "tools.preprocess"
TOKENS = ("--tokenizer", "byte", "--workers", "1")
TRAIN = (SCRIPT, "recipe.toml", "--run_dir", "run", "--train.exit_interval", "1")
TRAINED = (1, 2)
"""What a run's folder does not allow is worth another attempt once it has checkpoints: training/run_dir/errors.py."""
SHARD = "shards/a-00000-of-00001"
BYTES = ("docs.jsonl", "docs.txt", "docs.jsonl.gz", "docs.jsonl.zst")

TARGETS: Sequence[Target] = (
    Target(
        name="recipe", scene="files", victims=("recipe.toml",), words=((SCRIPT, "recipe.toml", "--dry_run"),),
        honours=recipe_in_force, weight=14,
    ),
    Target(
        name="recipe, run", scene="files", victims=("recipe.toml",), words=((*RESUME, "--train.exit_interval", "1"),),
        honours=recipe_in_force, weight=6,
    ),
    Target(name="flags of a run", scene="files", words=((SCRIPT, "recipe.toml", "--dry_run"),), weight=8),
    Target(
        name="run's files", scene="run", victims=BESIDE + POINTERS + FOLDERS, words=(RESUME,), results=run_results,
        refused=TRAINED, weight=14,
    ),
    Target(
        name="owner's records", scene="run", victims=OWNERS, words=(RESUME,), results=run_results,
        refused=TRAINED, prepare=hostile_scenes.with_dead_owner, before=hostile_scenes.waits_briefly, weight=5,
    ),
    Target(
        name="checkpoint", scene="run", victims=(*FILES, *OLDER, f"{CHECKPOINT}/rank_*.bin"), words=(RESUME,),
        results=run_results, weight=10,
    ),
    Target(
        name="checkpoint, re-signed", scene="run", victims=FILES, words=(RESUME,), results=run_results, signed=True,
        weight=12,
    ),
    Target(
        name="supervise.decide", scene="run", victims=BESIDE + POINTERS + FOLDERS, fine=(0, 1), reads_all=False,
        words=(("tools.supervise.decide", "--run_dir", "run", "--exit_code", "1"),), weight=6,
    ),
    Target(
        name="inspect_checkpoint", scene="run", victims=(*FILES, f"{CHECKPOINT}/rank_*.bin", *POINTERS),
        words=((INSPECT, "run"), (INSPECT, "run", "--list"), (INSPECT, "run", "--verify", "hashes"),
               (INSPECT, "run", "--tensor", "*"), (INSPECT, "run", "--diff", "run/checkpoints/iter_0000001")),
        fine=(0, 1), signed=False, reads_all=False, weight=6,
    ),
    Target(
        name="inspect_checkpoint, re-signed", scene="run", victims=FILES, signed=True, fine=(0, 1), reads_all=False,
        words=((INSPECT, "run"), (INSPECT, "run", "--list"), (INSPECT, "run", "--verify", "hashes"),
               (INSPECT, "run", "--tensor", "*"), (INSPECT, "run", "--diff", "run/checkpoints/iter_0000001")),
        weight=6,
    ),
    Target(
        name="reshard", scene="run", victims=(*FILES, f"{CHECKPOINT}/rank_*.bin"),
        words=(("tools.reshard", "run", "out"),), results=shard_results("out/*.bin"), weight=4,
    ),
    Target(
        name="reshard, re-signed", scene="run", victims=FILES, signed=True, words=(("tools.reshard", "run", "out"),),
        results=shard_results("out/*.bin"), weight=5,
    ),
    Target(
        name="export, re-signed", scene="run", victims=FILES, signed=True,
        words=(("tools.convert", "export", CHECKPOINT, "out"),), results=shard_results("out/*.safetensors"), weight=5,
    ),
    Target(
        name="import", scene="model", victims=("hf/*",),
        words=(("tools.convert", "import", "hf", "out", "--no_logits"),), results=shard_results("out/*.bin"), weight=10,
    ),
    Target(
        name="raw text", scene="text", victims=BYTES, reads_all=False, honours=documents_are_counted,
        words=tuple((PREPROCESS, name, "--output", "out/x", *TOKENS) for name in BYTES), weight=8,
    ),
    Target(
        name="preprocess, continued", scene="text", victims=("shards/a*", "shards/a.preprocess/*", "small.jsonl"),
        words=((PREPROCESS, "small.jsonl", "--output", "shards/a", *TOKENS),), results=shard_results("shards/a*.bin"),
        weight=6,
    ),
    Target(
        name="preprocess verify", scene="text", victims=("shards/*", "shards/*/*"), fine=(0, 1), reads_all=False,
        words=((PREPROCESS, "verify", "shards"),), weight=6,
    ),
    Target(
        name="tokenizer", scene="text", victims=("tokenizer/*", "t.model"), reads_all=False,
        words=((PREPROCESS, "docs.jsonl", "--output", "out/x", "--workers", "1", "--tokenizer", "tokenizer"),
               (PREPROCESS, "docs.jsonl", "--output", "out/x", "--workers", "1", "--tokenizer", "t.model"),
               (*TRAIN, "--data.paths", "docs.txt", "--data.tokenizer", "tokenizer/tokenizer.json"),
               (*TRAIN, "--data.paths", "docs.txt", "--data.tokenizer", "t.model")), weight=6,
    ),
    Target(
        name="shards", scene="text", victims=tuple(f"{SHARD}.{ending}" for ending in ("bin", "idx", "json")),
        words=((*TRAIN, "--data.paths", SHARD),), results=outcome_of_training, weight=10,
    ),
    Target(
        name="blend file", scene="text", victims=("blend.toml", "blend.txt"), reads_all=False,
        words=((*TRAIN, "--data.blend_file", "blend.toml"), (*TRAIN, "--data.blend_file", "blend.txt")), weight=6,
    ),
    Target(
        name="token cache", scene="run", victims=("cache/tokens/*/*", "cache/tokens/*.lock", "cache/tokens/*/"),
        words=(RESUME,), results=run_results, weight=4,
    ),
    Target(
        name="from_megatron", scene="files", victims=("pretrain.sh",), fine=(0, 1), reads_all=False,
        words=(("tools.from_megatron", "pretrain.sh"),), weight=8,
    ),
    Target(
        name="cluster file", scene="files", victims=("cluster.toml",), reads_all=False,
        words=(("tools.clusters", "./cluster.toml"), ("tools.clusters", "./cluster.toml", "--sbatch"),
               ("tools.plan", "--model", "llama3_8b", "--cluster", "./cluster.toml", "--num_gpus", "8",
                "--global_batch_size", "64")), weight=8,
    ),
    Target(
        name="flags of the tools", scene="files", words=(
            ("tools.plan", "--model", "llama3_8b", "--cluster", "h100_ib", "--num_gpus", "8",
             "--global_batch_size", "64", "--seq_length", "4096", "--mbs", "1", "--tp", "2"),
            ("tools.plan", "goodput", "--num_gpus", "1024", "--days", "10", "--failures_per_gpu_hour", "2e-5",
             "--stall_s", "5", "--seed", "1"),
            ("tools.supervise.decide", "--run_dir", "run", "--exit_code", "1", "--max_attempts", "5"),
        ), fine=(0, 1), weight=6,
    ),
    Target(
        name="goodput's measurements", scene="files", victims=("faults.md",), reads_all=False,
        words=(("tools.plan", "goodput", "--num_gpus", "1024", "--days", "10", "--faults", "faults.md"),), weight=2,
    ),
)  # fmt: skip
