"""make bench-data: the data layer's figures against its peers', in a table and in docs/benchmarks/data.json.

    python -m tests.benchmarks data [--megatron_lm CHECKOUT]

CPU-seconds, children included; ratios from one run. A missing peer is a row that says so, and no pass. Exit code 0:
measured; 1: something is below its goal.
"""

import dataclasses
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from program.flags import parse_flags
from tests.benchmarks.circumstances import ROOT, circumstances, earlier, keep, versions
from tests.benchmarks.data import bucket, loading, tokenising
from tests.benchmarks.data.table import MeasuredRow
from tools.shared.written import check_place

PEERS = ("megatron-core", "tokenizers", "sentencepiece", "tiktoken", "gigatoken", "mosaicml-streaming", "litdata")


@dataclass(kw_only=True)
class DataBenchmark:
    """Measure tokenising and loading."""

    megatron_lm: Path | None = None
    """A checkout of Megatron-LM, whose tools/preprocess_data.py is the peer."""
    size_mb: float = 64.0
    """Text to tokenise, in 10^6 bytes."""
    folder: Path | None = None
    """Where corpora and tokenizers are kept for the next time. None: nowhere."""
    only: str = ""
    """"tokenising", "loading" or "bucket"; nothing: all."""
    output: Path = ROOT / "docs/benchmarks/data.json"
    """JSON with an entry for each of the three; what is not measured keeps its own."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    asked = parse_flags(DataBenchmark, argv, "python -m tests.benchmarks data", __doc__)
    earlier(asked.output)
    if asked.folder:
        check_place(asked.folder / "hf", "--folder")
    with tempfile.TemporaryDirectory() as scratch:
        folder = asked.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        start_s, verdicts = time.monotonic(), []
        parts = {
            "tokenising": lambda: tokenising.rows(folder, asked.size_mb, asked.megatron_lm),
            "loading": lambda: loading.rows(folder),
            "bucket": lambda: bucket.rows(folder),
        }
        print(f"{'measure':<58} {'ours':>10} {'peer':>10} {'unit':<14} {'ratio':>7} {'goal':>9}", flush=True)
        for name, rows in parts.items():
            if asked.only in ("", name):
                found = []
                for row in rows():
                    found.append(row)
                    print(row.text(), flush=True)
                verdicts += [row.verdict for row in found]
                _keep(asked.output, name, found)
        reached, all_rows = verdicts.count("yes"), len(verdicts)
        print(f"{reached} of {all_rows} goals reached, {verdicts.count('not measured')} not measured, "
              f"{time.monotonic() - start_s:.0f} s")  # fmt: skip
    return 1 if "NO" in verdicts else 0


def _keep(output: Path, part: str, found: Sequence[MeasuredRow]) -> None:
    kept = earlier(output)
    said = [dataclasses.asdict(row) | {"ratio": row.ratio, "reached": row.verdict} for row in found]
    kept[part] = circumstances() | {"versions": versions(PEERS), "results": said}
    keep(output, kept)
