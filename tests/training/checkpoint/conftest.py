"""Checkpoints that several files restore; torch is imported only where one is made."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TP2 PP2 DP2, with sequence parallelism, several buckets, and parameters that are gathered late."""
    from checkpoint_parts import configuration, on_ranks, save_and_go_on, sizes

    folder = tmp_path_factory.mktemp("llama")
    overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 20000}
    on_ranks(8, configuration(sizes(tp=2, pp=2, sequence_parallel=True, **overlap)), save_and_go_on, folder)
    return folder


@pytest.fixture(scope="session")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half of the experts on each rank of a stage, whose attention is split over TP: experts and the rest differ."""
    from checkpoint_parts import deepseek_on, on_ranks, save_and_go_on, sizes

    folder = tmp_path_factory.mktemp("deepseek")
    parallel = sizes(tp=2, pp=2, sequence_parallel=True, expert_model_parallel_size=2, expert_tensor_parallel_size=1)
    on_ranks(4, deepseek_on(parallel), save_and_go_on, folder)
    return folder
