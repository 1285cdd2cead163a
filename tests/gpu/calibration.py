"""On a rank: what tools.plan calibrate measures of these ranks' cards and links, as a cluster file's text."""

import tempfile
from pathlib import Path

from parallel.launch import Identity
from tests.gpu import products
from tools.plan.calibrate.command import calibrate


def measure(identity: Identity, card_products: bool) -> str:
    """Rank 0's; empty on the others."""
    if not card_products:
        products.shrink()
    with tempfile.TemporaryDirectory(prefix="triplane-calibrate-") as folder:
        path = Path(folder, "cluster.toml")
        calibrate(path)
        return path.read_text() if identity.rank == 0 else ""
