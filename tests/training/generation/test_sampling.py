"""Which tokens may be drawn, and how often."""

from functools import partial

import pytest
import torch

from ranks import run_ranks
from training.generation.sampling import choose, generator_of, probabilities
from training.generation.settings import Sampling

LOGITS = [2.0, 1.0, 0.0, -1.0, 1.0]


def check(sampling: Sampling, expected: list[float]) -> None:
    found = probabilities(torch.tensor(LOGITS), sampling)
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-4, rtol=0)


def check_filters(_identity: object) -> None:
    soft = torch.softmax(torch.tensor(LOGITS) / 0.5, -1).tolist()
    check(Sampling(temperature=0.5), soft)
    top = [soft[0], 0, 0, 0, 0]
    check(Sampling(temperature=0.5, top_k=1), [1.0, 0, 0, 0, 0])
    # of equal logits at the edge all stay; a nucleus ends with the token that reaches it
    three = sum(soft[number] for number in (0, 1, 4))
    check(Sampling(temperature=0.5, top_k=2), [soft[0] / three, soft[1] / three, 0, 0, soft[4] / three])
    check(Sampling(temperature=0.5, top_p=soft[0] - 1e-3), [one / soft[0] for one in top])
    two = soft[0] + soft[1]
    check(Sampling(temperature=0.5, top_p=soft[0] + 1e-3), [soft[0] / two, soft[1] / two, 0, 0, 0])
    check(Sampling(temperature=0.5, top_k=99, top_p=1.0), soft)


def check_draws(_identity: object) -> None:
    logits, sampling = torch.tensor(LOGITS), Sampling(temperature=1.0, seed=3)
    draw = generator_of(sampling, 0)
    drawn = torch.bincount(torch.tensor([choose(logits, sampling, draw) for _ in range(4000)]), minlength=5) / 4000
    torch.testing.assert_close(drawn, torch.softmax(logits, -1), atol=0.03, rtol=0)
    assert [choose(logits, Sampling(seed=seed), draw) for seed in range(9)] == [0] * 9, "greedy, whatever the seed"
    texts = [
        [choose(logits, sampling, draw) for _ in range(20)] for draw in map(partial(generator_of, sampling), (0, 1))
    ]
    again = generator_of(sampling, 1)
    assert texts[0] != texts[1] == [choose(logits, sampling, again) for _ in range(20)]


def test_filters() -> None:
    run_ranks(1, check_filters)


def test_draws() -> None:
    run_ranks(1, check_draws)


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        (Sampling(temperature=-0.1), "--temperature must be 0"),
        (Sampling(temperature=float("nan")), "--temperature must be 0"),
        (Sampling(top_p=0.0), "--top_p must be above 0"),
        (Sampling(top_p=1.5), "--top_p must be above 0"),
        (Sampling(top_k=-1), "--top_k must be 0"),
        (Sampling(seed=-1), "--seed must be 0"),
    ],
)
def test_out_of_range(sampling: Sampling, words: str) -> None:
    (problem,) = sampling.problems("--")
    assert problem.startswith(words)
