"""A plan as a recipe: short or with all fields, it loads to exactly the configuration that was planned."""

import dataclasses
import random
from pathlib import Path

import pytest

from models.config import ModelConfig
from models.families import PUBLISHED
from tools import clusters
from tools.plan.search.enumeration import candidates
from tools.plan.search.pricing import PricedLayout, price
from tools.plan.search.recipe import PATHS, TOKENIZER, Length, configuration, lasting, problems, write
from tools.plan.search.request import PlanRequest
from training.config.recipe import load
from training.config.run_config import RunConfig

ROOT = Path(__file__).resolve().parents[3]
NAMES = [name for name in PUBLISHED if name not in ("debug", "demo")]
BASES = (None, "debug", "llama3_8b", "deepseek_v3")


def planned(seed: int) -> tuple[PlanRequest, PricedLayout, RunConfig | None, Length | None]:
    """A model on a cluster, one of the layouts that are offered, a recipe that it starts from, and how long it is."""
    draw = random.Random(seed)
    while True:
        base = draw.choice(BASES)
        started = load(ROOT / f"slurm/recipes/{base}.toml") if base else None
        model = ModelConfig(shape=draw.choice(NAMES), seq_length=draw.choice((1024, 4096, 8192)))
        if started is not None:
            started = dataclasses.replace(started, model=model)
        asked = PlanRequest(
            model=model, cluster=clusters.load(draw.choice(("h100_ib", "a100_ib", "gb200", "t4_ethernet"))),
            num_gpus=draw.choice((1, 8, 16, 64, 72)), global_batch_size=draw.choice((64, 72, 256)),
            fixed=draw.choice(({}, {"zero": 1}, {"tp": 2})), cuda_graphs=draw.random() < 0.2,
        )  # fmt: skip
        offered = candidates(asked)
        for layout in draw.sample(offered, min(20, len(offered))):
            if not problems(asked, layout, started) and (plans := price(asked, [layout])):
                length = Length(train_iters=300_000, save_interval=3, why_so_often="so often")
                return asked, plans[0], started, draw.choice((None, length))


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.campaign) for seed in range(6, 300))]
)
def test_it_loads_to_what_was_planned(seed: int, tmp_path: Path) -> None:
    asked, plan, base, length = planned(seed)
    expected = lasting(configuration(asked, plan.layout, base), length)
    for full in (False, True):
        path = tmp_path / f"{full}.toml"
        write(path, asked, plan, base, length, full)
        assert load(path) == expected
    text = (tmp_path / "False.toml").read_text()
    assert PATHS in text and (TOKENIZER in text) == (expected.data.tokenizer == RunConfig().data.tokenizer)
    uncommented = text.replace("# paths", "paths").replace("# tokenizer", "tokenizer")
    path.write_text(uncommented)
    assert load(path).data.paths == ("shards/web*",)


@pytest.mark.campaign
def test_what_megatrons_ddp_alone_does_is_left_out_where_shards_do_without() -> None:
    """And NCCL's own buffers where they would hang or were not captured: the layout stays on offer."""
    base = load(ROOT / "slurm/recipes/deepseek_v3.toml")
    entries = ("use_sharp=True", "nccl_ub=True", "average_in_collective=True")
    base = dataclasses.replace(base, parallel=dataclasses.replace(base.parallel, megatron=entries))
    asked = PlanRequest(model=base.model, cluster=clusters.load("h100_ib"), num_gpus=2048, global_batch_size=15360)
    kept = {}
    for layout in candidates(asked):
        kept[layout.zero > 1, layout.pp > 1] = configuration(asked, layout, base).parallel.megatron
        if len(kept) == 4:
            break
    assert kept[False, True] == ("use_sharp=True", "average_in_collective=True")
    assert kept[True, False] == kept[True, True] == ("use_sharp=True",)
    assert kept[False, False] == entries
