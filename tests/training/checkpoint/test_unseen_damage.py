"""Damage that a fitting manifest hides, or that only reading meets: every rank takes the older checkpoint."""

import os
from pathlib import Path

import torch.distributed as dist
import xxhash

from parallel.config import ParallelConfig
from parallel.launch import Identity
from ranks import run_ranks
from tests.faults.damages import Heard
from tests.faults.trainer import TINY, configuration, own_digest, started
from training import checkpoint
from training.checkpoint.format.manifest import read_manifest, write_manifest
from training.checkpoint.format.reader import FileReader
from training.checkpoint.format.tables import PIECES, FileFacts
from training.checkpoint.format.verify import damages
from training.checkpoint.format.writer import DATA, LENGTH_BYTES
from training.config.checkpoint_config import CheckpointConfig


def pieces_lie_elsewhere(newest: Path) -> None:
    pieces = newest / PIECES
    pieces.write_text(pieces.read_text().replace("rank_00001.bin", "../rank_01.bin"))
    manifest = read_manifest(newest)
    tensors = {name: facts for name, facts in manifest.files.items() if name.endswith(DATA)}
    write_manifest(newest, tensors, manifest.about)


def generators_are_garbage(newest: Path) -> None:
    """Only seen when torch refuses them: sizes, and the hash of the table, are as they were."""
    with FileReader(newest) as reader:
        [piece, *_] = reader.pieces("rng.python")
    with (newest / piece.file).open("r+b") as file:
        file.seek(piece.position)
        file.write(b"\xff" * reader.tensors["rng.python"].piece_bytes(piece.shape))


def the_older_one_is_taken(identity: Identity, folder: Path, damage: str, printed: str) -> None:
    console = os.memfd_create("console")
    with started(configuration(ParallelConfig(), **TINY), identity, console if identity.rank == 0 else None) as trainer:
        digests = []
        for iteration in (1, 2):
            trainer.train(iteration)
            trainer.save(folder, checkpoint.Contents(keep=2, texts={"config.toml": "x = 1\n"}))
            digests.append(own_digest(trainer))
        if identity.rank == 0:
            globals()[damage](folder / "iter_0000002")
        dist.barrier()
        restored = checkpoint.restore(
            folder, CheckpointConfig(verify="sizes"), trainer.chunks, trainer.optimizer, trainer.ranks
        )
        assert restored is not None
        assert restored.path.name == "iter_0000001"
        assert own_digest(trainer) == digests[0]
        if identity.rank == 0:
            said = Heard(console)()
            assert printed in said, said
            assert not (folder / "iter_0000002").exists()
            assert (folder / "iter_0000002.damaged").exists()


def test_pieces_that_lie_elsewhere(tmp_path: Path) -> None:
    run_ranks(2, the_older_one_is_taken, tmp_path, "pieces_lie_elsewhere", "of ../rank_01.bin, which has 0")


def test_generators_that_torch_refuses(tmp_path: Path) -> None:
    run_ranks(2, the_older_one_is_taken, tmp_path, "generators_are_garbage", "a generator's state cannot be restored")


def test_a_table_that_is_none_is_damage(tmp_path: Path) -> None:
    table = b'{"groups": 7}'
    whole = bytes(100) + table + len(table).to_bytes(LENGTH_BYTES, "little")
    (tmp_path / f"part{DATA}").write_bytes(whole)
    facts = FileFacts(len(whole), xxhash.xxh3_128(table).hexdigest())
    write_manifest(tmp_path, {f"part{DATA}": facts}, {"iteration": 7})
    [found] = damages(tmp_path, "hashes")
    assert found.file == f"part{DATA}"
    assert "its end is not the table of its pieces" in found.text
