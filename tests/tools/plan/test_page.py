"""The page: complete, self-contained, and of one mind with what is printed."""

import html
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


ASKED = "--model llama3_70b --cluster h100_ib --num_gpus 128 --global_batch_size 512 --seq_length 8192".split()


def page(path: Path, *flags: str) -> str:
    at = [*flags].index("explain") if "explain" in flags else len(flags)
    assert main([*flags[at:], *ASKED, *flags[:at], "--report", str(path)]) == 0
    return html.unescape(path.read_text())


def drawing(text: str, heading: str) -> ElementTree.Element:
    """The first picture below a heading."""
    return ElementTree.fromstring(re.findall(f"<h2>{heading}</h2>.*?(<svg.*?</svg>)", text, re.DOTALL)[0])


def said(picture: ElementTree.Element) -> list[tuple[str, float, float]]:
    return [(str(word.text), float(word.get("x", 0)), float(word.get("y", 0))) for word in picture.iter("text")]


def test_the_page_has_the_rows_that_are_printed_in_their_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = page(tmp_path / "plan.html", "--tp", "8")
    printed = capsys.readouterr().out.splitlines()
    start = next(number for number, line in enumerate(printed) if "4 of 5 runs" in line)
    rows = printed[start : start + 11]
    assert "\n".join(rows) in text
    for heading in ("Step time", "Memory"):
        labels = [word for word, _, _ in said(drawing(text, heading)) if word.startswith("TP")]
        assert len(labels) == 10 and all(label in row for label, row in zip(labels, rows[1:], strict=True))


@pytest.mark.campaign
def test_a_layout_that_was_asked_about_comes_last(tmp_path: Path) -> None:
    text = page(tmp_path / "plan.html", "--tp", "8", "explain", "PP=8,mbs=4,recompute=full")
    labels = [word for word, _, _ in said(drawing(text, "Step time")) if word.startswith("TP")]
    assert len(labels) == 11 and labels[-1].startswith("TP8 PP8") and "MBS4" in labels[-1]


@pytest.mark.parametrize("flags", [("--tp", "8"), ("explain", "TP=8,PP=4")], ids=" ".join)
@pytest.mark.campaign
def test_more_or_fewer_gpus_keep_the_constraints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, str]
) -> None:
    text = page(tmp_path / "plan.html", *flags)
    chosen = re.findall(r"^(TP8 .*): .* s a step, of which", capsys.readouterr().out, re.M)
    tips = [str(tip.text) for tip in drawing(text, "More or fewer GPUs").iter("title")]
    assert len(tips) == 5 and all(": TP8 " in tip for tip in tips)
    assert next(tip for tip in tips if tip.startswith("128 GPUs: ")).startswith(f"128 GPUs: {chosen[0]}, ")
    assert "all with TP 8" in text


def test_the_points_fill_their_picture(tmp_path: Path) -> None:
    text = page(tmp_path / "plan.html", "--tp", "8", "--zero", "1")
    picture = drawing(text, "Time against memory")
    across = [float(dot.get("cx", 0)) for dot in picture.iter("circle")]
    assert min(across) < 125 and max(across) > 860
    counts = [y for word, _, y in said(drawing(text, "More or fewer GPUs")) if word in ("64", "128")]
    shares = [y for word, _, y in said(drawing(text, "More or fewer GPUs")) if word.endswith("%")]
    assert len(counts) == 2 and max(shares) < min(counts) - 11  # one line above


def test_a_page_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "none" / "plan.html"
    flags = "--model llama3_8b --num_gpus 8 --global_batch_size 64 --report".split()
    assert main([*flags, str(path)]) == 2
    assert "cannot be written" in capsys.readouterr().err
