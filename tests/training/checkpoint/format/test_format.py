"""Files of a checkpoint: written in any pieces, read in any others; what is not whole is noticed."""

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from program.errors import UserError
from training.checkpoint.format import coverage, manifest
from training.checkpoint.format import reader as reading
from training.checkpoint.format.coverage import covered_once
from training.checkpoint.format.manifest import MANIFEST, DamagedError, read_manifest, write_manifest
from training.checkpoint.format.pieces import TensorGroup
from training.checkpoint.format.reader import FileReader
from training.checkpoint.format.tables import INDEX, PIECES, IncompleteError, merge, remove_tables
from training.checkpoint.format.verify import damages, strangers
from training.checkpoint.format.writer import FileWriter

Box = tuple[tuple[int, ...], tuple[int, ...]]


def cut(shape: tuple[int, ...], draw: random.Random, most: int) -> list[Box]:
    """A tensor in at most ``most`` rectangles, by cutting the largest one at a random place again and again."""
    boxes: list[Box] = [((0,) * len(shape), shape)]
    while len(boxes) < most:
        offset, size = boxes.pop(max(range(len(boxes)), key=lambda number: np.prod(boxes[number][1])))
        dims = [dim for dim, length in enumerate(size) if length > 1]
        if not dims:
            return [*boxes, (offset, size)]
        dim = draw.choice(dims)
        at = draw.randrange(1, size[dim])
        boxes.append((offset, (*size[:dim], at, *size[dim + 1 :])))
        boxes.append(
            ((*offset[:dim], offset[dim] + at, *offset[dim + 1 :]), (*size[:dim], size[dim] - at, *size[dim + 1 :]))
        )
    return boxes


def part(tensor: np.ndarray, box: Box) -> np.ndarray:
    return tensor[tuple(slice(start, start + length) for start, length in zip(*box, strict=True))]


def write(
    folder: Path, groups: dict[TensorGroup, list[np.ndarray]], writers: int, seed: int = 0, most: int = 7
) -> list[str]:
    """Cut every tensor, deal the pieces to writers, and merge: a checkpoint without its manifest."""
    draw = random.Random(seed)
    names = [f"rank_{number:05d}" for number in range(writers)]
    files = [FileWriter(folder, name) for name in names]
    for group, tensors in groups.items():
        for box in cut(group.shape, draw, most):
            buffers = [memoryview(np.ascontiguousarray(part(tensor, box))) for tensor in tensors]
            draw.choice(files).add(group, *box, buffers)
    for file in files:
        file.close()
    return names


def tensors(shape: tuple[int, ...], dtype: type, count: int = 1) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [draw.integers(0, 250, size=shape).astype(dtype) for _ in range(count)]


@pytest.fixture
def committed(tmp_path: Path) -> Path:
    groups = {
        TensorGroup(("weight",), "bfloat16", (12, 10)): tensors((12, 10), np.uint16),
        TensorGroup(("param", "exp_avg", "exp_avg_sq"), "float32", (3, 5, 7)): tensors((3, 5, 7), np.uint32, 3),
    }
    names = write(tmp_path, groups, writers=3)
    facts = merge(tmp_path, names)
    remove_tables(tmp_path, names)
    (tmp_path / "state.json").write_text('{"format": 2}')
    write_manifest(tmp_path, facts, {"iteration": 7})
    return tmp_path


# ---- pieces


@settings(max_examples=60)
@given(st.lists(st.integers(1, 9), min_size=0, max_size=4), st.integers(0, 10_000), st.integers(1, 4))
def test_any_rectangle_of_any_pieces_is_read_back(shape: list[int], seed: int, writers: int) -> None:
    import tempfile

    whole, draw = tuple(shape), random.Random(seed)
    with tempfile.TemporaryDirectory() as scratch:
        three = tensors(whole, np.uint32, 3)
        group = TensorGroup(("a", "b", "c"), "float32", whole)
        merge(Path(scratch), write(Path(scratch), {group: three}, writers, seed, most=draw.randrange(1, 12)))
        with FileReader(Path(scratch)) as reader:
            for key, tensor in zip("abc", three, strict=True):
                assert np.array_equal(reader.whole(key), tensor)
                for box in cut(whole, draw, 6):
                    into = np.zeros(box[1], dtype=np.uint32)
                    reader.read(key, box[0], into)
                    assert np.array_equal(into, part(tensor, box))


def test_long_and_short_runs_are_read_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows far apart are fetched one by one, near ones together; columns of a large matrix both ways."""
    shape = (40, 6, 50)
    [tensor] = tensors(shape, np.uint16)
    merge(tmp_path, write(tmp_path, {TensorGroup(("w",), "bfloat16", shape): [tensor]}, 1, most=1))
    box = ((3, 2, 11), (30, 3, 20))
    for limit in (1, 64, 1 << 20):
        monkeypatch.setattr(reading, "SEGMENT_BYTES", limit)
        into = np.zeros((60, 6, 40), dtype=np.uint16)[::2, ::2, ::2]  # memory with gaps
        with FileReader(tmp_path) as reader:
            reader.read("w", box[0], into)
        assert np.array_equal(into, part(tensor, box)), limit


def test_columns_are_read_without_their_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of a page and more: the share of one of eight TP ranks of a row-parallel matrix, and no byte beside it."""
    shape = (16, 8192)
    [tensor] = tensors(shape, np.uint32)
    merge(tmp_path, write(tmp_path, {TensorGroup(("w",), "float32", shape): [tensor]}, 1, most=1))
    into, read, preadv = np.zeros((16, 1024), dtype=np.uint32), [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda *wanted: read.append(preadv(*wanted)) or read[-1])
    with FileReader(tmp_path) as reader:
        reader.read("w", (0, 3072), into)
    assert np.array_equal(into, tensor[:, 3072:4096])
    assert sum(read) == into.nbytes


def test_a_gap_in_what_was_asked_for_is_an_error(committed: Path) -> None:
    with FileReader(committed) as reader, pytest.raises(ValueError, match=r"holds 20 of the 40 elements"):
        reader.read("weight", (10, 0), np.zeros((4, 10), dtype=np.uint16))
    with FileReader(committed) as reader, pytest.raises(ValueError, match="words of 4 bytes"):
        reader.read("weight", (0, 0), np.zeros((1, 1), dtype=np.uint32))


@settings(max_examples=80)
@given(st.lists(st.integers(1, 8), min_size=1, max_size=4), st.integers(0, 10_000))
def test_coverage_is_noticed_without_comparing_pieces(shape: list[int], seed: int) -> None:
    whole, draw = tuple(shape), random.Random(seed)
    boxes = cut(whole, draw, 8)
    assert covered_once(whole, boxes)
    assert covered_once(whole, [*boxes, ((0,) * len(whole), (0,) * len(whole))])
    assert not covered_once(whole, boxes[1:])
    assert not covered_once(whole, [*boxes, boxes[0]])
    same_volume = [box for box in boxes[1:] if np.prod(box[1]) == np.prod(boxes[0][1])]
    if same_volume:  # a hole and an overlap of one size
        assert not covered_once(whole, [same_volume[0], *boxes[1:]])
    assert not covered_once(whole, [*boxes[1:], (boxes[0][0], tuple(length + 1 for length in boxes[0][1]))])


def test_coverage_holds_where_sums_are_evicted_between_two_pieces() -> None:
    """As threads of a verification do to each other."""

    def boxes() -> Iterator[Box]:
        for row in range(3):
            coverage._prefix_sums.cache_clear()
            yield (row, 0), (1, 5)

    assert covered_once((3, 5), boxes())


def test_what_writers_left_out_or_wrote_twice_is_named(tmp_path: Path) -> None:
    group = TensorGroup(("w",), "float32", (4, 4))
    for number, box in enumerate([((0, 0), (2, 4)), ((2, 0), (2, 4))]):
        with FileWriter(tmp_path, f"rank_{number}") as file:
            file.add(group, *box, [memoryview(np.zeros(box[1], dtype=np.uint32))])
    merge(tmp_path, ["rank_0", "rank_1"])
    for names in (["rank_0"], ["rank_0", "rank_0", "rank_1"]):
        with pytest.raises(IncompleteError, match=r"w \[4, 4\]"):
            merge(tmp_path, names)
    with pytest.raises(OSError, match="rank_2"):
        merge(tmp_path, ["rank_0", "rank_1", "rank_2"])


def test_a_piece_of_another_size_is_refused(tmp_path: Path) -> None:
    file = FileWriter(tmp_path, "rank_0")
    with pytest.raises(ValueError, match="16 bytes for each"):
        file.add(TensorGroup(("w",), "float32", (4,)), (0,), (4,), [memoryview(bytes(15))])


# ---- the commit


def test_a_folder_counts_only_with_its_manifest(committed: Path) -> None:
    assert read_manifest(committed).about == {"iteration": 7}
    assert damages(committed, "hashes") == []
    (committed / MANIFEST).unlink()
    with pytest.raises(DamagedError, match="not the manifest"):
        read_manifest(committed)


def test_a_later_format_is_refused(committed: Path) -> None:
    values = json.loads((committed / MANIFEST).read_text()) | {"format": 3}
    del values["hash"]
    (committed / MANIFEST).write_bytes(manifest._as_bytes(values))
    with pytest.raises(UserError, match="has format 3"):
        read_manifest(committed)


def test_a_flipped_bit_of_the_format_is_damage_not_a_later_version(committed: Path) -> None:
    text = (committed / MANIFEST).read_text()
    (committed / MANIFEST).write_text(text.replace('"format": 2', '"format": 3'))
    with pytest.raises(DamagedError, match=r"manifest\.json: not the manifest .*expected the hash"):
        read_manifest(committed)


def test_a_manifest_that_means_the_same_but_is_laid_out_otherwise_is_damage(committed: Path) -> None:
    text = (committed / MANIFEST).read_text()
    (committed / MANIFEST).write_text(text.replace('"iteration"', r'"iter\u0061tion"'))
    assert json.loads((committed / MANIFEST).read_text()) == json.loads(text)
    with pytest.raises(DamagedError, match="laid out otherwise"):
        read_manifest(committed)


def everywhere(folder: Path) -> Iterator[tuple[str, int]]:
    """Every byte of every file, but of the long ones every seventh."""
    for path in sorted(folder.iterdir()):
        size = path.stat().st_size
        yield from ((path.name, at) for at in range(0, size, 7 if size > 300 else 1))


def test_every_changed_byte_is_named(committed: Path) -> None:
    for name, at in everywhere(committed):
        data = bytearray((committed / name).read_bytes())
        data[at] ^= 0x10
        (committed / name).write_bytes(data)
        assert [damage.file for damage in damages(committed, "hashes")] == [name], (name, at)
        data[at] ^= 0x10
        (committed / name).write_bytes(data)
    assert damages(committed, "hashes") == []


def test_a_damaged_tensor_is_named(committed: Path) -> None:
    with FileReader(committed) as reader:
        piece = reader.pieces("exp_avg")[0]
        at = piece.position + 4 * int(np.prod(piece.shape))  # the group's second tensor
    path = committed / piece.file
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    [damage] = damages(committed, "hashes")
    assert damage.text.endswith("(in exp_avg)")


def test_sizes_find_what_is_cut_missing_or_too_much(committed: Path) -> None:
    path = committed / "rank_00001.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    (committed / "left.bin").write_bytes(b"x")
    (committed / PIECES).unlink()
    found = {damage.file: damage.text for damage in damages(committed, "sizes")}
    assert found.keys() == {"rank_00001.bin", PIECES}
    assert strangers(committed) == ["left.bin"]
    assert f"expected {len(whole):,} bytes, found {len(whole) - 1:,}" in found["rank_00001.bin"]
    assert "No such file" in found[PIECES]


def test_shares_look_at_every_file_once(committed: Path) -> None:
    for name in ("rank_00000.bin", "state.json", INDEX):
        data = (committed / name).read_bytes()
        (committed / name).write_bytes(data[:-1] + b"?")
    found = [damages(committed, "hashes", (part, 3)) for part in range(3)]
    assert sorted(damage.file for share in found for damage in share) == [INDEX, "rank_00000.bin", "state.json"]


def test_nothing_outside_the_folder_is_opened(committed: Path) -> None:
    """A table that names another folder's file: an attacker can recompute every hash."""
    lines = (committed / PIECES).read_text().replace("rank_00000.bin", "../rank_00.bin")
    (committed / PIECES).write_text(lines)
    os.link(committed / "rank_00000.bin", committed.parent / "rank_00.bin")
    with FileReader(committed) as reader, pytest.raises(DamagedError, match="no file of this folder"):
        for key in reader.tensors:
            reader.whole(key)
