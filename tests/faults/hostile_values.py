"""Values that no field expects, from a seed: boundary numbers, control characters, depth, and Hypothesis's own finds.

Values are the text that stands in a JSON file: some of them no JSON library would write.
"""

import json
from random import Random
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

DEPTH = 5000
NUMBERS = (
    "-1", "0", "1", "-0.0", "0.5", str(2**31), str(-(2**31) - 1), str(2**53 + 1), str(2**62), str(2**63), str(2**64),
    str(2**80), "9" * 400, "9" * 5000, "1e308", "1e-308", "1e400", "-1e400", "NaN", "Infinity", "-Infinity",
)  # fmt: skip
TEXTS = (
    "", "x" * 100_000, "\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "\0", "a\nb\nfault: c", "\r\x08", "\ud800", "\ufeff",
    "../../etc/passwd", "/dev/zero", "/", ".", "..", "~", "%s%n{0}", "$(touch witness)", "-1", "NaN", "\u202egpj.exe",
    "\x9b31m", "name" * 80,
)  # fmt: skip
OTHERS = ("null", "true", "false", "[]", "{}", "[[]]", '{"":null}')
DEEP = ("[" * DEPTH + "]" * DEPTH, '{"a":' * DEPTH + "1" + "}" * DEPTH)

_SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=40),
)  # fmt: skip
TREES = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)


def draw_from(strategy: st.SearchStrategy[Any], number: int) -> Any:
    """A value of ``strategy`` that is a function of ``number``: its third example, the first being the simplest.

    ``find`` and ``example`` shrink or are not seeded; a test of three examples that only remembers is.
    """
    found: list[Any] = []

    @seed(number)
    @settings(
        max_examples=3, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(strategy)
    def remember(value: Any) -> None:
        found.append(value)

    remember()
    return found[-1]


def json_text(draw: Random) -> str:
    """What stands in a JSON file in place of a value."""
    kind = draw.randrange(10)
    if kind < 4:
        return draw.choice(NUMBERS)
    if kind < 6:
        return json.dumps(draw.choice(TEXTS))
    if kind == 6:
        return draw.choice(OTHERS)
    if kind == 7:
        return draw.choice(DEEP)
    return json.dumps(draw_from(TREES, draw.getrandbits(32)))


def word(draw: Random) -> str:
    """An argument of a command line: any text without NUL, also what is no UTF-8."""
    kind = draw.randrange(6)
    if kind < 3:
        return draw.choice(NUMBERS)
    if kind < 5:
        return draw.choice(TEXTS).replace("\0", "").replace("\ud800", "\udcff")
    text = str(draw_from(st.text(max_size=30), draw.getrandbits(32)))
    return text.encode("utf-8", "replace").decode().replace("\0", "")


def plain(draw: Random) -> Any:
    """A value as Python has it, for what a library writes."""
    while True:
        try:
            return json.loads(json_text(draw))
        except (RecursionError, ValueError):
            continue
