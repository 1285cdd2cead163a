"""The page: complete, self-contained, and its pipeline drawn as Megatron's schedules run it."""

import itertools
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import pytest

from tools.plan.__main__ import main
from tools.plan.page.timeline import schedule
from training.memory.layouts import Candidate


def test_one_file_without_a_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.html"
    flags = "--model llama3_8b --cluster a100_ib --num_gpus 32 --global_batch_size 128 --tp 2 --pp 4 --report".split()
    assert main([*flags, str(path)]) == 0
    assert str(path) in capsys.readouterr().out
    text = path.read_text()
    assert not re.search(r"(src|href)=|url\(|@import|<script", text)
    drawings = [ElementTree.fromstring(found) for found in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]
    assert len(drawings) == 6
    headings = re.findall(r"<h2>(.*?)</h2>", text)
    assert headings == [
        "Chosen", "Step time", "Memory", "Time against memory", "Pipeline", "More or fewer GPUs",
        "Prediction against published runs",
    ]  # fmt: skip
    assert len(list(drawings[-1].iter("circle"))) > 500
    bars = [float(bar.get("width", 0)) for bar in drawings[0].iter("rect")]
    assert min(bars) >= 0 and max(bars) < 960


@pytest.mark.parametrize("layout", [Candidate(pp=4, microbatches=8), Candidate(pp=4, vpp=2, microbatches=8)], ids=str)
def test_every_pass_runs_once_and_in_order(layout: Candidate) -> None:
    works = schedule(layout, 1.0, 2.0)
    passes = Counter((work.stage, work.chunk, work.microbatch, work.backward) for work in works)
    assert set(passes.values()) == {1} and len(passes) == 4 * layout.vpp * 8 * 2
    for stage in range(4):
        own = sorted((work for work in works if work.stage == stage), key=lambda work: work.start)
        assert all(before.end <= after.start for before, after in itertools.pairwise(own))
    total, busy = max(work.end for work in works), 8 * layout.vpp * 3.0
    assert total == pytest.approx(busy + 3 * 3.0)  # (PP - 1) of one chunk: arXiv:2104.04473, section 2.2


def test_a_page_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "none" / "plan.html"
    flags = "--model llama3_8b --num_gpus 8 --global_batch_size 64 --report".split()
    assert main([*flags, str(path)]) == 2
    assert "cannot be written" in capsys.readouterr().err
