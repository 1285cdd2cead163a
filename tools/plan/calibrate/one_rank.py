"""A cluster file that calibrate wrote from one rank, and so without having seen a link."""

from tools.clusters import Cluster


def made_up_links(cluster: Cluster) -> str | None:
    """The warning, as long as the file does not say what the links are; None: they are known."""
    fabric = cluster.fabric
    if cluster.measured.get("ranks") != 1 or (fabric.scale_up_gb_per_s, fabric.nic_gb_per_s) != (1.0, 1.0):
        return None
    return (
        f"warning: {cluster.name} was measured on one rank: its [fabric] is made up (1 GB/s), and so is all time that "
        "more than one rank spends on communication. Run calibrate under torchrun or srun with as many ranks as you "
        "have, or write your links into [fabric]."
    )
