import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.split import SPLITS, split_documents, split_shards

WEIGHTS = st.tuples(st.integers(1, 1000), st.integers(0, 1000), st.integers(0, 1000))


def sizes(document_count, split):
    return [len(documents) for documents in split_documents(document_count, split).values()]


@given(st.integers(0, 10**9), WEIGHTS)
def test_splits_are_contiguous_and_cover_every_document(document_count, weights):
    splits = split_documents(document_count, ",".join(map(str, weights)))
    assert tuple(splits) == SPLITS
    position = 0
    for documents in splits.values():
        assert documents.start == position
        position = documents.stop
    assert position == document_count


@given(st.integers(3, 10**6), WEIGHTS)
def test_every_weight_gets_a_document_and_zero_gets_none(document_count, weights):
    for size, weight in zip(sizes(document_count, ",".join(map(str, weights))), weights, strict=True):
        assert (size > 0) == (weight > 0)


@given(st.integers(3000, 10**6))
def test_boundaries_are_megatrons_where_no_split_is_empty(document_count):
    from_megatron = [round(0.969 * document_count), round(0.999 * document_count), document_count]
    splits = split_documents(document_count, "969,30,1")
    assert [documents.stop for documents in splits.values()] == from_megatron


@pytest.mark.parametrize("document_count, expected", [(0, [0, 0, 0]), (1, [1, 0, 0]), (2, [1, 1, 0]), (3, [1, 1, 1])])
def test_few_documents_go_to_train_then_validation(document_count, expected):
    assert sizes(document_count, "969,30,1") == expected


def test_a_weight_of_zero_gets_nothing():
    assert sizes(10, "1,0,0") == [10, 0, 0]


@given(st.lists(st.integers(0, 300), min_size=1, max_size=30).filter(any), WEIGHTS)
def test_shards_together_give_each_split_as_many_documents_as_one_shard_would(counts, weights):
    split = ",".join(map(str, weights))
    found = [0, 0, 0]
    for count, documents in zip(counts, split_shards(counts, split), strict=True):
        position = 0
        for number, part in enumerate(documents.values()):
            assert part.start == position <= part.stop
            found[number] += len(part)
            position = part.stop
        assert position == count
    assert found == sizes(sum(counts), split)


def test_every_split_has_its_part_of_every_shard():
    for documents in split_shards([1000, 3000, 2000], "8,1,1"):
        count = documents["test"].stop
        assert [len(part) for part in documents.values()] == [0.8 * count, 0.1 * count, 0.1 * count]
