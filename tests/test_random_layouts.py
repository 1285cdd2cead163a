"""Random legal layouts of four ranks, with every sharding strategy, train as one rank: 6 here, 300 by --campaign."""

import functools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

import ranks  # noqa: F401  (imports torch and megatron once)
from data.prepared import Prepared
from layout_cases import MOE, Model, model
from tools.parity.compare import Observed, compare, observe
from tools.parity.layouts import with_layout

RANKS = 4
MODELS = [
    model("dense", "", num_layers=4, global_batch_size=4),
    model("tied, biases, learned positions", "", num_layers=4, global_batch_size=4, shape="gpt2_tiny"),
    model("experts", "", num_layers=4, global_batch_size=4, **MOE),
    model("depths of prediction", "", num_layers=4, global_batch_size=4, mtp_num_layers=1),
]


def drawn(seed: int) -> tuple[Model, str]:
    """A model and a layout of four ranks that RunConfig.problems accepts."""
    draw = random.Random(seed)
    while True:
        chosen = draw.choice(MODELS)
        sizes = {name: draw.choice((1, 1, 2, 4)) for name in ("tp", "pp", "cp", "dp")}
        if sizes["tp"] * sizes["pp"] * sizes["cp"] * sizes["dp"] != RANKS:
            continue
        words = [f"{name}{size}" for name, size in sizes.items() if size > 1]
        words += ["sp"] if sizes["tp"] > 1 and draw.random() < 0.7 else []
        words += ["vpp2"] if sizes["pp"] == 2 and draw.random() < 0.5 else []
        words += [draw.choice(("ep2", "ep4", "ep2etp1"))] if chosen.name == "experts" and draw.random() < 0.8 else []
        words += [draw.choice(("zero0", "zero2", "zero3", "zero3", "zero3", "overlap"))]
        words += ["hsdp2"] if words[-1] in ("zero2", "zero3") and draw.random() < 0.3 else []
        layout = "".join(words)
        config, world_size = with_layout(chosen.config(), layout)
        if world_size == RANKS and not config.problems(RANKS):
            return chosen, layout


@pytest.fixture(scope="module")
def references(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Iterator[functools.cache]:  # type: ignore[type-arg]
    """A model on one rank, trained when first asked for."""

    @functools.cache
    def reference(chosen: Model) -> Observed:
        return observe(chosen.config(), prepared, "tp1", tmp_path_factory.mktemp("one"))

    yield reference


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.campaign) for seed in range(6, 300))]
)
def test_a_random_layout_trains_as_one_rank(
    seed: int, prepared: Prepared, references: functools.cache, tmp_path: Path
) -> None:  # type: ignore[type-arg]
    chosen, layout = drawn(seed)
    verdict = compare(chosen.config(), prepared, layout, references(chosen), tmp_path)
    assert not verdict.problems, (chosen.name, verdict)
