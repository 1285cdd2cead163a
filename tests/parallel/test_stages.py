"""Which layers live on which chunk, and splits that cannot be."""

import dataclasses

import pytest

from parallel.config import ParallelConfig
from parallel.stages import layers_per_chunk, layout_chunks, layout_string, stage_problems


def split(
    pp: int,
    vpp: int | None = None,
    first: int | None = None,
    last: int | None = None,
    layout: str | None = None,
) -> ParallelConfig:
    return ParallelConfig(
        pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=vpp,
        num_layers_in_first_pipeline_stage=first, num_layers_in_last_pipeline_stage=last,
        pipeline_model_parallel_layout=layout,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("parallel", "num_layers", "expected"),
    [
        (split(1), 4, [4]),
        (split(4), 4, [1, 1, 1, 1]),
        (split(2, vpp=2), 8, [2, 2, 2, 2]),
        (split(4, first=1, last=1), 10, [1, 4, 4, 1]),
        (split(4, first=3), 12, [3, 3, 3, 3]),
        (split(4, last=2), 11, [3, 3, 3, 2]),
        (split(2, vpp=2, first=4, last=2), 6, [2, 1, 2, 1]),
        (split(2, layout="Et|tttL"), 4, [1, 3]),
        (split(4, layout="E|t*2|(t)*2|L"), 4, [0, 2, 2, 0]),
        (split(2, vpp=2, layout="Et|t|t|tL"), 4, [1, 1, 1, 1]),
    ],
)
def test_layers_of_each_chunk(parallel: ParallelConfig, num_layers: int, expected: list[int]) -> None:
    assert stage_problems(parallel, num_layers) == []
    assert layers_per_chunk(parallel, num_layers) == expected


@pytest.mark.parametrize(
    ("parallel", "num_layers", "words"),
    [
        (split(4), 6, ["model.num_layers 6", "PP 4 x VPP 1 = 4 chunks", "Use 4 or 8 layers", "layout"]),
        (split(4, vpp=2), 4, ["PP 4 x VPP 2 = 8 chunks", "Use 8 layers"]),
        (
            split(4, first=2, last=1),
            4,
            ["4 layers", "first stage 2, last stage 1", "leave 1 for 2 other stages"],
        ),
        (split(2, first=2, last=1), 4, ["leave 1 for 0 other stages"]),
        (split(2, vpp=2, first=3, last=1), 4, ["a stage of 3 layers", "VPP 2"]),
        (split(1, first=2), 4, ["need parallel.pipeline_model_parallel_size > 1"]),
        (split(2, layout="Et|ttL"), 4, ["has 3 layers (t), model.num_layers is 4"]),
        (split(2, layout="Et|t|ttL"), 4, ["has 3 stages, expected PP x VPP = 2"]),
        (split(2, layout="Ett|tt"), 4, ["end with its only L"]),
        (split(2, layout="|EtttL"), 3, ["E in the first stage"]),
        (split(2, layout="Etx|ttL"), 4, ['may hold E, t, m, L, |, *number and (groups), found "Etx|ttL"']),
        (split(2, layout="E(tt|ttL"), 4, ["(groups)"]),
        (split(2, layout="Et*99999|L"), 4, ["may hold"]),
        (split(2, first=2, layout="Ett|ttL"), 4, ["remove one of the two"]),
    ],
)
def test_splits_that_cannot_be(parallel: ParallelConfig, num_layers: int, words: list[str]) -> None:
    problems = "\n".join(stage_problems(parallel, num_layers))
    assert all(word in problems for word in words), problems


def test_megatrons_layout_letters() -> None:
    assert layout_chunks("Et*2| (t|)*3 , tL") == ["Ett", "t", "t", "t", "tL"]


def accounted(pp: int, *, embedding: bool = False, loss: bool = False, vpp: int | None = None) -> ParallelConfig:
    return ParallelConfig(
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        account_for_embedding_in_pipeline_split=embedding,
        account_for_loss_in_pipeline_split=loss,
    )


@pytest.mark.parametrize(
    ("parallel", "num_layers", "expected"),
    [
        (accounted(4, embedding=True, loss=True), 6, [1, 2, 2, 1]),
        (accounted(2, loss=True), 3, [2, 1]),
        (accounted(2, embedding=True), 3, [1, 2]),
        (accounted(2, embedding=True, loss=True, vpp=2), 6, [1, 2, 2, 1]),
        (accounted(2, embedding=True, loss=True), 2, [1, 1]),
    ],
)
def test_embedding_and_loss_take_the_place_of_layers(
    parallel: ParallelConfig, num_layers: int, expected: list[int]
) -> None:
    assert stage_problems(parallel, num_layers) == []
    assert layers_per_chunk(parallel, num_layers) == expected


@pytest.mark.parametrize(
    ("parallel", "num_layers", "words"),
    [
        (accounted(4, loss=True), 4, ["num_layers 4 and 1 more", "account_for_loss", "Use 3 or 7 layers"]),
        (accounted(1, loss=True), 4, ["needs parallel.pipeline_model_parallel_size > 1"]),
        (dataclasses.replace(accounted(2, loss=True), num_layers_in_first_pipeline_stage=1), 3, ["remove one of"]),
        (dataclasses.replace(split(2, layout="Et|tL"), account_for_loss_in_pipeline_split=True), 2, ["account_for_"]),
    ],
)
def test_accounted_splits_that_cannot_be(parallel: ParallelConfig, num_layers: int, words: list[str]) -> None:
    problems = "\n".join(stage_problems(parallel, num_layers))
    assert all(word in problems for word in words), problems


def test_mtp_depths_stand_before_the_loss() -> None:
    assert stage_problems(split(2, layout="Ett|tmmL"), 3, mtp_num_layers=2) == []
    assert stage_problems(split(2, layout="Ett|tL"), 3, mtp_num_layers=2) == []  # left out: the same place
    (problem,) = stage_problems(split(2, layout="Ett|tmL"), 3, mtp_num_layers=2)
    assert "1 MTP depths (m)" in problem and "model.mtp_num_layers 2" in problem
    (problem,) = stage_problems(split(2, layout="Ettm|tL"), 3, mtp_num_layers=1)
    assert "right before L" in problem
    (problem,) = stage_problems(split(3, layout="Et|ttm|L"), 3, mtp_num_layers=1)
    assert "in front of the last stage" in problem
    assert layers_per_chunk(split(2, layout="Ett|tmmL"), 3) == [2, 1]


@pytest.mark.parametrize(
    ("chunks", "words"),
    [
        ([3, 2, 2, 1], "Ettt|(tt|)*2tL"),
        ([1, 0], "Et|L"),
        ([16, 15, 15, 15], "Et*16|(t*15|)*2t*15L"),
        ([2, 1, 2, 1], "Ett|t|tt|tL"),
    ],
)
def test_chunks_as_a_layout_string(chunks: list[int], words: str) -> None:
    assert layout_string(chunks) == words
    assert [chunk.count("t") for chunk in layout_chunks(words)] == chunks
