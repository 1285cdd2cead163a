"""One case of a campaign."""

import time

from models.families import TINY
from parallel import mcore_patches
from tests.oracle.compared import judge
from tests.oracle.imported import import_models
from tests.oracle.kinds import kinds
from tests.oracle.recipes import drawn
from tests.oracle.results import CaseResult

KEPT = 12
"""Words of a case that are kept."""

mcore_patches.check_once()  # before ranks are forked
import_models(TINY.values())


def run(seed: int, date: str, commit: str) -> CaseResult:
    """Its recipe trained, and judged."""
    began, case = time.monotonic(), drawn(seed)
    verdict = judge(case)
    return CaseResult(
        seed=seed,
        kind=verdict.kind,
        title=case.title,
        kinds=kinds(case),
        words=verdict.words[:KEPT],
        furthest=verdict.furthest,
        drawn_again=verdict.drawn_again,
        seconds=time.monotonic() - began,
        date=date,
        commit=commit,
    )
