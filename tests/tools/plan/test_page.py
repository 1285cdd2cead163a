"""The page: complete, self-contained, and of one mind with what is printed."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tools.plan.__main__ import main


def test_one_file_without_a_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.html"
    flags = "--model llama3_8b --cluster a100_ib --num_gpus 32 --global_batch_size 128 --tp 2 --pp 4 --report".split()
    assert main([*flags, str(path)]) == 0
    assert str(path) in capsys.readouterr().out
    text = path.read_text()
    assert not re.search(r"(src|href)=|url\(|@import|<script", text)
    drawings = [ElementTree.fromstring(found) for found in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]
    assert len(drawings) == 7
    headings = re.findall(r"<h2>(.*?)</h2>", text)
    assert headings == [
        "Chosen", "Step time", "Memory", "Time against memory", "Pipeline", "More or fewer GPUs",
        "Prediction against published runs",
    ]  # fmt: skip
    assert len(list(drawings[-1].iter("circle"))) > 500
    bars = [float(bar.get("width", 0)) for bar in drawings[0].iter("rect")]
    assert min(bars) >= 0 and max(bars) < 960


def test_a_page_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "none" / "plan.html"
    flags = "--model llama3_8b --num_gpus 8 --global_batch_size 64 --report".split()
    assert main([*flags, str(path)]) == 2
    assert "cannot be written" in capsys.readouterr().err
