"""The bubble of pipelines whose spans are given."""

from parallel.layout import Layout, bubble
from training.profile.spans import RankTimeline, StepSpan, from_zero, pipeline_bubble


def one_forward_one_backward(
    stages: int, microbatches: int, forward_s: float, backward_s: float
) -> list[list[StepSpan]]:
    """Megatron's schedule without a chunk more and with messages that take no time: each pass as early as it can be."""
    order = [
        [("forward", n) for n in range(warm)]
        + [pair for n in range(warm, microbatches) for pair in (("forward", n), ("backward", n - warm))]
        + [("backward", n) for n in range(microbatches - warm, microbatches)]
        for warm in (min(stages - 1 - stage, microbatches) for stage in range(stages))
    ]
    ends = dict[tuple[int, str, int], float]()
    at, done = [0.0] * stages, [0] * stages
    spans: list[list[StepSpan]] = [[] for _ in range(stages)]
    while any(done[stage] < len(order[stage]) for stage in range(stages)):
        for stage in range(stages):
            if done[stage] == len(order[stage]):
                continue
            kind, number = order[stage][done[stage]]
            source = stage + (-1 if kind == "forward" else 1)
            needs = (source, kind, number) if 0 <= source < stages else None
            if needs is not None and needs not in ends:
                continue
            begin = max(at[stage], ends[needs] if needs else 0.0)
            at[stage] = begin + (forward_s if kind == "forward" else backward_s)
            ends[stage, kind, number] = at[stage]
            spans[stage].append(StepSpan(kind, number, 0, begin, at[stage]))
            done[stage] += 1
    return spans


def test_the_bubble_of_spans_made_by_hand() -> None:
    """Two ranks, 10 s from 2 to 12, of which they compute 6 and 7."""
    first = [StepSpan("forward", 0, 0, 2, 4), StepSpan("backward", 0, 0, 8, 12), StepSpan("reduce", None, None, 12, 20)]
    second = [
        StepSpan("forward", 0, 0, 4, 7),
        StepSpan("backward", 0, 0, 7, 11),
        StepSpan("update", None, None, 20, 30),
    ]
    assert pipeline_bubble([[first, second]]) == 1 - 13 / 20
    shifted = [
        [span._replace(begin_s=span.begin_s + 5, end_s=span.end_s + 5) for span in one] for one in (first, second)
    ]
    assert pipeline_bubble([[first, second], shifted]) == 1 - 13 / 20  # each pipeline by its own time
    assert pipeline_bubble([[[StepSpan("forward", 0, 0, 1, 3)]]]) == 0
    assert pipeline_bubble([]) == pipeline_bubble([[[]]]) == 0


def test_the_bubble_of_equal_passes_is_the_theory_s() -> None:
    """arXiv:2104.04473, section 2.2, has idle over computing time: (p - 1) / m."""
    for stages, microbatches in ((2, 8), (4, 8), (4, 3)):
        measured = pipeline_bubble([one_forward_one_backward(stages, microbatches, 1.0, 2.0)])
        theory = bubble(Layout(pp=stages), microbatches)
        assert abs(measured / (1 - measured) - theory) < 1e-9


def test_a_timeline_begins_at_zero() -> None:
    late, early = StepSpan("backward", 0, 0, -1.5, 1.25), StepSpan("forward", 0, 0, -3.0, -2.0000004)
    found = from_zero([
        RankTimeline(rank=0, pp=0, spans=(late, early)), RankTimeline(rank=1, pp=1, spans=(late,))
    ])  # fmt: skip
    assert found[0].spans == (StepSpan("forward", 0, 0, 0.0, 1.0), StepSpan("backward", 0, 0, 1.5, 4.25))
    assert found[1].spans == (StepSpan("backward", 0, 0, 1.5, 4.25),)
