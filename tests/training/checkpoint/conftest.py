"""Checkpoints that several files restore; torch is imported only where one is made."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TP2 PP2 DP2, with sequence parallelism, several buckets, and parameters that are gathered late."""
    from checkpoint_parts import configuration, on_ranks, save_and_go_on, sizes

    folder = tmp_path_factory.mktemp("llama")
    overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 20000}
    on_ranks(8, configuration(sizes(tp=2, pp=2, sequence_parallel=True, **overlap)), save_and_go_on, folder, 3)
    return folder
