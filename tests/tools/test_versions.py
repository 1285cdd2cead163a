"""The version check of ``make setup VENV=system``."""

from importlib.metadata import version

import pytest

from tools.versions import problems, torch_at


def test_what_is_missing_or_out_of_range_is_named() -> None:
    installed = version("numpy")
    text = f"numpy {installed} is outside the range that has been run: numpy"
    assert problems(["numpy"]) == ([], [])
    assert problems([f"numpy>{installed}"]) == ([], [f"{text}>{installed}"])
    assert problems(["numpy==1.0"]) == ([f"{text}==1.0"], [])
    assert problems(["no-such-package>=1"]) == (["no-such-package is not installed; expected no-such-package>=1"], [])


def test_a_containers_build_suffix_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "2.13.0a0+nv26.11")
    assert problems(["torch>=2.13,<2.14"]) == ([], [])
    assert problems(["torch>=2.14"])[1] != []


def test_the_ends_of_the_range_are_those_of_the_requirement() -> None:
    requirements = ["numpy>=2", "torch<2.16,>=2.11"]
    assert torch_at("oldest", requirements) == "torch==2.11.*"
    assert torch_at("newest", requirements) == "torch<2.16,>=2.11"
