"""Damage that a fitting manifest hides: all ranks end alike, with one message, whichever of them met it."""

from pathlib import Path

import pytest
import torch.distributed as dist
import xxhash

from parallel.config import ParallelConfig
from parallel.errors import SharedMistake
from parallel.launch import Identity
from ranks import run_ranks
from tools.faults.trainer import TINY, configuration, started
from training import checkpoint
from training.checkpoint.format.manifest import read_manifest, write_manifest
from training.checkpoint.format.tables import PIECES, FileFacts
from training.checkpoint.format.verify import damages
from training.checkpoint.format.writer import DATA, LENGTH_BYTES
from training.config import CheckpointConfig


def pieces_lie_elsewhere(identity: Identity, folder: Path) -> None:
    with started(configuration(ParallelConfig(), **TINY), identity) as trainer:
        trainer.train(1)
        trainer.save(folder, checkpoint.Contents(keep=2, texts={"config.toml": "x = 1\n"}))
        newest = folder / "iter_0000001"
        if identity.rank == 0:
            pieces = newest / PIECES
            pieces.write_text(pieces.read_text().replace("rank_00001.bin", "../rank_01.bin"))
            manifest = read_manifest(newest)
            tensors = {name: facts for name, facts in manifest.files.items() if name.endswith(DATA)}
            write_manifest(newest, tensors, manifest.about)
        dist.barrier()
        with pytest.raises(SharedMistake, match=r"is damaged: rank \d: .*Use --checkpoint\.verify hashes"):
            checkpoint.restore(
                folder, CheckpointConfig(verify="sizes"), trainer.chunks, trainer.optimizer, trainer.ranks
            )


def test_what_one_rank_cannot_read_ends_all_of_them(tmp_path: Path) -> None:
    run_ranks(2, pieces_lie_elsewhere, tmp_path)


def test_a_table_that_is_none_is_damage(tmp_path: Path) -> None:
    table = b'{"groups": 7}'
    whole = bytes(100) + table + len(table).to_bytes(LENGTH_BYTES, "little")
    (tmp_path / f"part{DATA}").write_bytes(whole)
    facts = FileFacts(len(whole), xxhash.xxh3_128(table).hexdigest())
    write_manifest(tmp_path, {f"part{DATA}": facts}, {"iteration": 7})
    [found] = damages(tmp_path, "hashes")
    assert found.file == f"part{DATA}"
    assert "its end is not the table of its pieces" in found.text
