"""python -m tests.gpu_path.checks.played_ranks MODEL LAYOUT [SECTION=VALUE ...]: a rank that one process plays against
the same rank of a job whose ranks all exist, on the emulated device: bytes of both, stage by stage, as JSON.
"""

import json
import sys
from typing import Any

from parallel.layout import Coordinates
from tests.gpu.layout_rows import LayoutRow, recipe_of
from tests.gpu.processes import ranks_of
from training.config.recipe import dump

SEQ_LENGTH, STEPS = 256, 1


def main(model: str, layout: str, train: str = "{}") -> None:
    """train: more fields of the recipe's section, as JSON."""
    pp = LayoutRow(model=model, layout=layout, microbatches=1)
    sizes = recipe_of(pp, SEQ_LENGTH, toy=True)[0].layout(recipe_of(pp, SEQ_LENGTH, toy=True)[1])
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in json.loads(train).items()}
    row = LayoutRow(model=model, layout=layout, microbatches=max(2, 2 * sizes.pp), train=fields)
    config, job_size = recipe_of(row, SEQ_LENGTH, toy=True)
    asked: dict[str, Any] = {"text": dump(config), "job_size": job_size, "steps": STEPS}
    real = ranks_of("pretended", job_size, rank=None, **asked)
    for stage in range(sizes.pp):
        rank = sizes.rank(Coordinates(dp=0, pp=stage, cp=0, tp=0))
        (played,) = ranks_of("pretended", rank=rank, **asked)
        print(json.dumps({"stage": stage, "real": real[rank], "played": played}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
