"""The version check of ``make setup VENV=system``."""

from importlib.metadata import version

from tools.versions import problems


def test_what_is_missing_or_out_of_range_is_named() -> None:
    installed = version("numpy")
    assert problems(["numpy"]) == []
    assert problems([f"numpy>{installed}"]) == [
        f"numpy {installed} is outside the range that has been run: numpy>{installed}"
    ]
    assert problems(["no-such-package>=1"]) == ["no-such-package is not installed; expected no-such-package>=1"]


def test_a_containers_build_suffix_does_not_count(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("importlib.metadata.version", lambda _: "2.11.0a0+nv25.11")
    assert problems(["torch>=2.11,<2.14"]) == []
    assert problems(["torch>=2.12,<2.14"]) != []
