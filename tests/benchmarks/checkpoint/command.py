"""Measure saving, loading and converting checkpoints, and write docs/benchmarks/checkpoint.json.

    python -m tests.benchmarks checkpoint [--subjects rounds convert scale bucket worker] [--folder FOLDER]

FOLDER lies on the disk to measure; about 4 times --gigabytes are needed there. Ratios are of medians of one run, whose
sides (ours.py; megatron.py, megatron-core's; disk.py, dd and a cold sequential read) are taken in turns (rounds.py), so
that what slows the machine down slows both. trainer.py has the model, conversion.py tools.convert against dd, scale.py
the tables of checkpoints of thousands of ranks, bucket.py an upload against plain copies to the same server.
"""

import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from models.shapes import GPTShape
from parallel import launch, local_ranks, output
from parallel.layout import Layout
from program.flags import parse_flags
from program.untrusted import read_json
from tests.benchmarks.checkpoint import bucket, conversion, scale
from tests.benchmarks.checkpoint.goals import ratio
from tests.benchmarks.circumstances import ROOT, circumstances, earlier, keep
from tools.shared.written import check_place

Subject = Literal["rounds", "convert", "scale", "bucket", "worker"]
VOCABULARY = 8192


@dataclass(kw_only=True)
class CheckpointBenchmark:
    """Measure checkpoints on the CPU."""

    subjects: tuple[Subject, ...] = ("rounds", "convert", "scale", "bucket")
    """rounds: save and load against disk and megatron-core; convert: tools.convert against dd; scale: tables of 512 and
    16,384 ranks; bucket: an upload against plain copies to the same server; worker: memory of one worker for a 70B
    model (reads 141 GB of holes: minutes)."""

    gigabytes: float = 1.2
    """Size of a checkpoint of rounds and bucket, and of the weights of convert."""

    nproc: tuple[int, ...] = (1, 2)
    """Data-parallel ranks of rounds, one run for each."""

    rounds: int = 5
    """Of everything in turns; medians count. One more comes first and does not count."""

    folder: Path | None = None
    """Where to write. None: a folder beside the checkout's results, removed again."""

    output: Path = ROOT / "docs/benchmarks/checkpoint.json"
    """JSON with one entry per subject; subjects that are not measured keep theirs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: measured, whether the goals were met or not; 1: a subject failed."""
    job = parse_flags(CheckpointBenchmark, argv, "python -m tests.benchmarks checkpoint", __doc__)
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # before torch is imported
    results = earlier(job.output)
    if job.folder is not None:
        check_place(job.folder / "triplane-benchmark-", "--folder")
    failed = False
    with tempfile.TemporaryDirectory(prefix="triplane-benchmark-", dir=job.folder) as folder:
        for subject in job.subjects:
            print(f"{subject} ...", flush=True)
            try:
                measured = measure(subject, job, Path(folder) / subject)
            except Exception as error:  # the other subjects are still worth measuring
                print(f"{subject} failed: {error}", file=sys.stderr)
                failed = True
                continue
            print("\n" + "\n".join(table(subject, measured)), flush=True)
            results[subject] = circumstances() | {"results": measured}
            keep(job.output, results)
    return int(failed)


def measure(subject: Subject, job: CheckpointBenchmark, folder: Path) -> list[dict[str, Any]]:
    """One subject's numbers."""
    size = int(job.gigabytes * 1e9)
    if subject == "rounds":
        return [medians(nproc, job.rounds, size, folder) for nproc in job.nproc]
    if subject == "convert":
        return [conversion.against_dd(_llama(size // 2), folder, job.rounds)]
    if subject == "bucket":
        return [bucket.against_copies(size, folder, job.rounds)]
    if subject == "worker":
        return [conversion.worker_memory("llama3_70b", folder)]
    return [
        scale.measure("llama3_70b", Layout(tp=8, pp=8, dp=8), 40_000_000, folder),
        scale.measure("llama31_405b", Layout(tp=8, pp=16, dp=128), 128_000_000, folder),
    ]


def medians(nproc: int, rounds: int, size: int, folder: Path) -> dict[str, Any]:
    """Of all rounds on ``nproc`` ranks. A time is that of the slowest rank; a growth, of the rank that grew most."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="triplane-benchmark-") as logs:
        with output.own_output(Path(logs), launch.Identity(), every_rank=False):  # torch loads noisily
            from tests.benchmarks.checkpoint import rounds as module
            from tests.benchmarks.checkpoint.trainer import BYTES_PER_PARAMETER
        hidden, layers = model_of(size / BYTES_PER_PARAMETER)
        task = module.Rounds(folder=folder / "files", rounds=rounds, num_layers=layers, hidden_size=hidden)

        def rank(identity: launch.Identity) -> int:
            with output.own_output(Path(logs), identity, every_rank=True):
                module.measure(identity, task, folder / "numbers")
            return 0

        _, failure = local_ranks.fork_ranks(nproc, rank)
        if failure is not None:
            raise RuntimeError(failure.text)
    found = [read_json(folder / f"numbers.{number}") for number in range(nproc)]
    names = {name for part in found for entry in part["rounds"] for name in entry}
    values = {
        name: statistics.median(
            max(part["rounds"][number].get(name, 0.0) for part in found) for number in range(rounds)
        )
        for name in sorted(names)
    }
    own = max(part["own_bytes"] for part in found)
    return {"nproc": nproc, "rounds": rounds, "bytes": found[0]["total_bytes"], "own_bytes": own, **values}


def model_of(parameters: float) -> tuple[int, int]:
    """Hidden size and layers of a model with about as many parameters, a fifth of them in the embeddings at most."""
    hidden = next((hidden for hidden in (1024, 512, 256) if 10 * VOCABULARY * hidden < parameters), 128)
    per_layer = 4 * hidden**2 + 3 * hidden * (hidden * 11 // 4)
    return hidden, max(1, round((parameters - 2 * VOCABULARY * hidden) / per_layer))


def _llama(parameters: int) -> GPTShape:
    """About as many parameters."""
    from dataclasses import replace

    from models.families import SHAPES

    layers = max(1, round((parameters - 2 * 32000 * 2048) / (4 * 2048**2 + 3 * 2048 * 5632)))
    return replace(
        SHAPES["llama2_7b"],
        num_layers=layers,
        hidden_size=2048,
        ffn_hidden_size=5632,
        num_attention_heads=16,
        num_query_groups=16,
        kv_channels=128,
    )


def table(subject: Subject, measured: list[dict[str, Any]]) -> list[str]:
    """The numbers as lines, each with its goal."""
    writers = {
        "rounds": _rounds_table, "convert": _convert_table, "scale": _scale_table, "bucket": bucket.table,
        "worker": _worker_table,
    }  # fmt: skip
    return [line for row in measured for line in writers[subject](row)]


def _rounds_table(row: dict[str, Any]) -> list[str]:
    mib, own = row["bytes"] / 2**20, row["own_bytes"]
    copying = row["copy_bytes"] + row["stall_growth"] + row["writer_anonymous"]
    write, read = row["dd_write_s"], row["dd_read_s"]
    theirs = {form: f"mcore {form}" for form in ("fully_reshardable", "dp_reshardable")}
    lines = [
        f"{row['nproc']} rank(s), {mib:,.0f} MiB, medians of {row['rounds']}; "
        f"dd writes {mib / write:,.0f} MiB/s, reads {mib / read:,.0f} MiB/s",
        ratio("save / dd", write / row["save_s"], 0.8),
        ratio("load (hashes) / dd", read / row["load_hashes_s"], 0.7),
        ratio("load (sizes) / dd", read / row["load_sizes_s"], 0.7),
        ratio("hashing adds", row["save_s"] / row["unhashed_save_s"] - 1, 0.10, most=True),
        ratio("stall / synchronous save", row["stall_s"] / row["save_s"], 0.05, most=True),
        ratio("  with no step to hide the copy", row["copy_s"] / row["save_s"], 0.05, most=True),
        ratio("memory, save / own shard", row["save_growth"] / own, 1.1, most=True),
        ratio(
            "memory, copy / own shard",
            copying / own,
            1.1,
            most=True,
        ),
        ratio("memory, load / own shard", row["load_hashes_growth"] / own, 1.1, most=True),
    ]
    for form, name in theirs.items():
        lines += [
            ratio(f"save / {name}", row[f"{form}_save_s"] / row["save_s"], 1.0),
            ratio(f"load (sizes) / {name}", row[f"{form}_load_s"] / row["load_sizes_s"], 1.5),
            ratio(f"load (hashes) / {name}", row[f"{form}_load_s"] / row["load_hashes_s"], 1.5),
            f"  {f'memory of {name} / own shard':42} save {row[f'{form}_save_growth'] / own:6.2f}, "
            f"load {row[f'{form}_load_growth'] / own:6.2f}",
        ]
    return lines


def _convert_table(row: dict[str, Any]) -> list[str]:
    mib = row["bytes"] / 2**20
    return [
        f"{mib:,.0f} MiB, one worker; dd copies {mib / row['dd_copy_s']:,.0f} MiB/s",
        ratio("import / dd", row["dd_copy_s"] / row["import_s"], 0.5),
        ratio("export / dd", row["dd_copy_s"] / row["export_s"], 0.5),
    ]


def _scale_table(row: dict[str, Any]) -> list[str]:
    mb = {name: row[name] / 1e6 for name in ("index_bytes", "pieces_bytes", "metadata_bytes_read_by_a_rank")}
    return [
        f"{row['shape']} on {row['layout']}",
        f"  {row['pieces']:,} pieces (at most {row['pieces_of_a_rank']:,} of a rank, "
        f"{row['table_bytes_of_a_rank'] / 1e3:,.0f} kB of table)",
        f"  the committing process: {row['merge_s']:.1f} s, {row['merge_growth_bytes'] / 1e6:,.0f} MB of memory; "
        f"index {mb['index_bytes']:.2f} MB, pieces {mb['pieces_bytes']:.1f} MB",
        f"  a rank that loads reads {mb['metadata_bytes_read_by_a_rank']:.2f} MB of them, "
        f"in {row['metadata_s_of_a_rank']:.2f} s",
    ]


def _worker_table(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['shape']}: {row['bytes'] / 1e9:,.0f} GB by one worker in {row['seconds']:,.0f} s",
        ratio("peak memory, GB", row["peak_anonymous_bytes"] / 1e9, 8.0, most=True),
    ]
