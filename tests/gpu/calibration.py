"""On a rank: what tools.plan calibrate measures of these ranks' cards and links, as a cluster file's text."""

import os
import tempfile
from pathlib import Path

from parallel.launch import LISTEN_FD, Identity
from tests.gpu import products
from tools.plan.calibrate.command import calibrate


def measure(identity: Identity, card_products: bool) -> str:
    """Rank 0's; empty on the others."""
    if not card_products:
        products.shrink()
    free_the_port(identity)
    with tempfile.TemporaryDirectory(prefix="triplane-calibrate-") as folder:
        path = Path(folder, "cluster.toml")
        calibrate(path)
        return path.read_text() if identity.rank == 0 else ""


def free_the_port(identity: Identity) -> None:
    """Rank 0 was started with a socket that listens there (parallel/local_ranks.py); calibrate opens its own."""
    listening = os.environ.pop(LISTEN_FD, None)
    if listening is not None and identity.rank == 0:
        os.close(int(listening))
