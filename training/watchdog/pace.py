"""How often nodes tell of themselves, and how long they have to answer.

Each node's word is four or five operations on the metadata of one folder of the shared file system, so a large run
speaks less often.
"""

BEAT_S = 5.0
"""Between two words of a node; of more than ``NODES`` nodes, so much longer that as many come per second."""
NODES = 128
MOST_BEAT_S = 30.0
"""A verdict of another node is read at the same times, and all ranks are to have ended within a minute."""
LOOK_S = 0.25
"""Between two looks of a watchdog at its node: 32 wake-ups a second on a node of 8 ranks, each of 0.1 ms."""
JUDGING_S = 1.0
"""Seconds between two reports of a node, and two reads of the others' reports, while a node judges."""
ANSWER_S = 20.0
"""How long nodes have to answer before they count as silent, on up to ``NODES`` nodes."""
LEAST_ANSWER_S = 3.0
FOREVER_S = 1e9
"""30 years: what stands for inf in JSON, which has none."""


def beat_s(step_timeout_s: float, nodes: float) -> float:
    """Seconds between two words of one of ``nodes`` nodes."""
    most = min(MOST_BEAT_S, max(LOOK_S, step_timeout_s / 8))
    return min(BEAT_S * max(1.0, nodes / NODES), most)


def answer_s(step_timeout_s: float, nodes: float) -> float:
    """How long one of ``nodes`` nodes has to answer: two words at least, at most a quarter of the timeout."""
    usual = max(ANSWER_S, 2.5 * beat_s(step_timeout_s, nodes))
    return max(LEAST_ANSWER_S, min(usual, step_timeout_s / 4))
