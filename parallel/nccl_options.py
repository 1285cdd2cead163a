"""Options of NCCL's that a recipe asks for: off by default, as no GPU has run them here."""

from parallel.config import ParallelConfig

FIELDS = ("high_priority_stream_groups",)


def nccl_problems(parallel: ParallelConfig, cuda: bool) -> list[str]:
    """Those that are asked for without a GPU, where collectives are gloo's."""
    asked = [name for name in FIELDS if getattr(parallel, name)]
    return [] if cuda else [f"parallel.{name} cannot be: it needs GPUs. Leave it out." for name in asked]
