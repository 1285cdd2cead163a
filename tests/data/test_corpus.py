import pytest

from data import corpus
from program.errors import UserError


def test_it_is_real_bounded_and_without_tests():
    files = corpus.files()
    assert 100 < len(files) == len(set(files))
    assert 1_000_000 < sum(path.stat().st_size for path in files) <= corpus.MAX_BYTES
    for path in files:
        assert not {"test", "tests", "idle_test", "site-packages"} & set(path.parts)
        path.read_bytes().decode()


def make_library(root, names):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"'''{name}'''\n")


def test_order_follows_names_only(tmp_path):
    names = [f"package{number % 3}/module{number}.py" for number in range(30)]
    make_library(tmp_path / "one", names)
    make_library(tmp_path / "deeper" / "two", reversed(names))
    one, two = tmp_path / "one", tmp_path / "deeper" / "two"
    first, second = ([path.relative_to(root) for path in corpus.files(root)] for root in (one, two))
    assert first == second
    assert len(first) == 30
    assert first != sorted(first)


def test_the_bound_keeps_a_prefix(tmp_path):
    make_library(tmp_path, [f"module{number:02}.py" for number in range(30)])
    assert corpus.files(tmp_path, max_bytes=200) == corpus.files(tmp_path)[:11]


def test_strangers_are_skipped(tmp_path):
    make_library(tmp_path, ["a.py", "test/b.py", "x/tests/c.py", "_sysconfigdata_linux.py", "d.txt"])
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    (tmp_path / "empty.py").touch()
    assert corpus.files(tmp_path) == [tmp_path / "a.py"]


def test_no_sources_is_a_users_error(tmp_path):
    with pytest.raises(UserError, match=r"Set data\.paths"):
        corpus.files(tmp_path)
