"""On the emulated device, a rank that one process plays (tests/gpu/pretended.py). A JSON object a line:

python -m tests.gpu_path.checks.played_ranks row NAME ...       toys of subject planned_layouts' rows
python -m tests.gpu_path.checks.played_ranks beside MODEL LAYOUT    each stage's first rank, played and real
"""

import json
import sys
from typing import Any

from parallel.layout import Coordinates
from tests.gpu.layout_rows import ROWS, LayoutRow, recipe_of
from tests.gpu.processes import ranks_of
from tests.gpu.subjects.planned_layouts import predicted
from training.config.recipe import dump
from training.memory.planned import Modules


def rows(*names: str) -> None:
    """The stage that the row is about."""
    for name in names:
        config, job_size = recipe_of(ROWS[name], 0, toy=True)
        stage = predicted(ROWS[name], config, job_size, Modules(cuda=True, transformer_engine=True)).stage
        rank = config.layout(job_size).rank(Coordinates(dp=0, pp=stage, cp=0, tp=0))
        (found,) = ranks_of("pretended", text=dump(config), job_size=job_size, rank=rank, steps=1)
        print(json.dumps({"row": name} | found), flush=True)


def beside(model: str, layout: str) -> None:
    """All ranks of the job exist, and then one at a time does."""
    sizes = recipe_of(LayoutRow(model=model, layout=layout, microbatches=1), 0, toy=True)[0].parallel
    pp = sizes.pipeline_model_parallel_size
    config, job_size = recipe_of(LayoutRow(model=model, layout=layout, microbatches=2 * pp), 0, toy=True)
    asked: dict[str, Any] = {"text": dump(config), "job_size": job_size, "steps": 1}
    real = ranks_of("pretended", job_size, rank=None, **asked)
    for stage in range(pp):
        rank = config.layout(job_size).rank(Coordinates(dp=0, pp=stage, cp=0, tp=0))
        (played,) = ranks_of("pretended", rank=rank, **asked)
        print(json.dumps({"stage": stage, "real": real[rank], "played": played}), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "row":
        rows(*sys.argv[2:])
    else:
        beside(*sys.argv[2:])
