"""Expert load, dropped assignments, balancing losses and MTP losses: what is measured, and the same on every layout."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

import runs
from campaign import param, some
from data.prepared import Prepared
from models.names import canonical
from models.resolve import resolve
from parallel import groups
from parallel.ddp import held
from parallel.launch import Identity
from parallel.regions import boxes_of
from ranks import run_ranks
from training import train
from training.batches import BatchStream
from training.config.run_config import RunConfig
from training.config.schedules import batch_schedule
from training.evaluation.scoring import forward_only
from training.forward_backward import run_schedule
from training.metrics.console import ConsoleSink
from training.metrics.jsonl import JsonlSink, read_jsonl
from training.metrics.meters import DepthMeter, ExpertMeter, model_meters
from training.metrics.values import curves
from training.parts.data import open_source
from training.parts.model import build_parts
from training.progress import Progress
from training.step import StepRequests

SHORT = ["--train.global_batch_size", "4", "--train.train_iters", "2", "--log.log_interval", "2"]
EXPERTS = ["--model.num_moe_experts", "4", "--model.moe_router_topk", "2", "--model.moe_ffn_hidden_size", "64"]
SOME_DENSE = ["--model.moe_layer_freq", "[0,1,1,1]"]
BALANCED = ["--model.moe_router_load_balancing_type", "aux_loss", "--model.moe_aux_loss_coeff", "0.05",
            "--model.moe_z_loss_coeff", "1e-3"]  # fmt: skip
TWO_DEPTHS = ["--model.mtp_num_layers", "2"]
STATS = ["--log.log_params_norm", "True", "--log.log_num_zeros_in_grad", "True", "--log.layer_stats_interval", "2"]
ALL = [*SHORT, *EXPERTS, *SOME_DENSE, *BALANCED, *TWO_DEPTHS, *STATS]
# The bias decides alone which experts a token gets: sigmoid scores lie between 0 and 1.
BIASED = ["--model.moe_router_score_function", "sigmoid", "--model.moe_router_enable_expert_bias", "True"]
TENSOR = "--parallel.tensor_model_parallel_size 2 --parallel.sequence_parallel True"
LAYOUTS = {
    "tp2sp": TENSOR + " --parallel.expert_model_parallel_size 2 --parallel.expert_tensor_parallel_size 1",
    "cp2ep2": "--parallel.context_parallel_size 2 --parallel.expert_model_parallel_size 2",
    "pp2": "--parallel.pipeline_model_parallel_size 2",
    "zero3": "--parallel.data_parallel_sharding_strategy optim_grads_params",
}
LAYER_STATS = ("layer_param_norm", "layer_grad_norm", "layer_output_rms", "layer_output_max")


@pytest.fixture(scope="module")
def reference(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """metrics.jsonl of the model with everything to measure, on one rank."""
    return runs.train(prepared, runs.configuration(tmp_path_factory.mktemp("one"), *ALL), 1)


def test_numbers_are_of_the_size_that_they_must_have(reference: list[dict[str, Any]]) -> None:
    """Fresh weights: nearly even use, losses near those of guessing. Wrong factors would be whole multiples off."""
    first = reference[0]
    assert list(first["expert_load"]) == ["1", "2", "3", "mtp.0", "mtp.1"]
    assert all(sum(loads) == pytest.approx(1, abs=1e-12) for loads in first["expert_load"].values())
    assert first["expert_load_max"] == 4 * max(max(loads) for loads in first["expert_load"].values())
    assert first["dropped_tokens"] == 0
    assert 0.99 < first["load_balancing_loss"] < 1.1
    assert first["z_loss"] == pytest.approx(math.log(4) ** 2, abs=0.1)
    assert first["mtp_loss"] == pytest.approx([math.log(257)] * 2, abs=0.2)


@pytest.mark.parametrize("layout", some(LAYOUTS, ("tp2sp",)))
def test_every_layout_measures_the_same(
    layout: str, reference: list[dict[str, Any]], prepared: Prepared, tmp_path: Path
) -> None:
    metrics = runs.train(prepared, runs.configuration(tmp_path / "run", *ALL, *LAYOUTS[layout].split()), 2)
    for expected, found in zip(reference, metrics, strict=True):
        for name in ("expert_load", "expert_load_max", "dropped_tokens"):
            assert found[name] == expected[name]
        for name in ("load_balancing_loss", "z_loss", "mtp_loss"):
            assert found[name] == pytest.approx(expected[name], rel=1e-5), name
        for name in ("param_norm", "zeros_in_grad"):
            assert found[name] == pytest.approx(expected[name], rel=1e-5), name
    for name in LAYER_STATS:
        assert found[name] == pytest.approx(expected[name], rel=1e-4), name


def test_blocks_add_up_to_the_whole_model(reference: list[dict[str, Any]]) -> None:
    first, last = reference
    assert "param_norm" in first and not first.keys() & {*LAYER_STATS}
    blocks = ["embedding", "0", "1", "2", "3", "mtp.0", "mtp.1", "output"]
    for table, total in (("layer_param_norm", "param_norm"), ("layer_grad_norm", "grad_norm")):
        assert list(last[table]) == blocks
        assert math.hypot(*last[table].values()) == pytest.approx(last[total], rel=1e-6)
    assert 0 < last["layer_output_rms"]["3"] < last["layer_output_max"]["3"]
    assert last["zeros_in_grad"] > 0  # rows of the vocabulary that no sample has


@pytest.mark.parametrize(
    ("kind", "flags", "rel"),
    [
        param(("seq_aux_loss", "--parallel.context_parallel_size 2", 1e-5)),
        # Its running means are over microbatches, of which each of two replicas has half: close, not the same.
        param(("global_aux_loss", "", 0.02)),
    ],
)
def test_balancing_losses_of_other_kinds(kind: str, flags: str, rel: float, prepared: Prepared, tmp_path: Path) -> None:
    of_kind = f"--model.num_layers 2 --model.moe_router_load_balancing_type {kind}".split()
    flags_of_all = [*SHORT, *EXPERTS, *BALANCED, *of_kind]
    one = runs.train(prepared, runs.configuration(tmp_path / "one", *flags_of_all), 1)
    two = runs.train(prepared, runs.configuration(tmp_path / "two", *flags_of_all, *flags.split()), 2)
    assert 0.99 < one[0]["load_balancing_loss"] < 1.2
    assert two[0]["load_balancing_loss"] == pytest.approx(one[0]["load_balancing_loss"], rel=rel)


def test_a_model_without_experts_and_depths_has_no_such_keys(prepared: Prepared, tmp_path: Path) -> None:
    (line,) = runs.train(prepared, runs.configuration(tmp_path, *SHORT, "--train.train_iters", "1"), 1)
    assert not {key for key in line if "expert" in key or "dropped" in key or "z_loss" in key or "mtp" in key}


# Known routing, and what counts


class Trial:
    """A model on this rank, with everything that a step needs."""

    def __init__(self, config: RunConfig, prepared: Prepared, ranks: groups.Ranks) -> None:
        self.ranks = ranks
        self.shape = resolve(config.model, prepared.tokenizer.vocab_size)
        self.parts = build_parts(config, self.shape, ranks)
        self.chunks = self.parts.chunks
        self.stream = BatchStream(
            lambda: open_source(prepared, config, "train"),
            ranks,
            batch_schedule(config.train, config.model.seq_length),
            1,
            0,
        )

    def step(self) -> None:
        train.one_step(self.parts, self.stream, Progress(), StepRequests())

    def evaluate(self) -> None:
        with forward_only(self.chunks), torch.no_grad():
            run_schedule(self.chunks, self.stream.next(64), self.ranks, 64, 1, forward_only=True)

    def prefer(self, experts: dict[str, Sequence[int]]) -> None:
        """Send all tokens of a block, by its canonical name, to these of its experts."""
        for chunk in self.chunks:
            for box in boxes_of(held(chunk)):
                if box.key.endswith("expert_bias"):
                    block = canonical(box.key).removesuffix(".mlp.router.expert_bias")
                    box.data[list(experts[block])] += 10.0


def with_trial(identity: Identity, config: RunConfig, prepared: Prepared, check: Any, *args: Any) -> None:
    with groups.start(config.layout(identity.world_size), identity, device="cpu", seed=1) as ranks_of_trial:
        trial = Trial(config, prepared, ranks_of_trial)
        check(trial, *args)
        trial.stream.close()


def see_known_routing(trial: Trial) -> None:
    trial.prefer({"layers.1": (0, 1), "layers.2": (1, 2), "layers.3": (0, 3), "mtp.0": (1, 3), "mtp.1": (2, 3)})
    meter = ExpertMeter(trial.shape, trial.chunks, trial.ranks)
    trial.step()
    values = meter.report()
    assert values == {
        "expert_load": {
            "1": [0.5, 0.5, 0, 0],
            "2": [0, 0.5, 0.5, 0],
            "3": [0.5, 0, 0, 0.5],
            "mtp.0": [0, 0.5, 0, 0.5],
            "mtp.1": [0, 0, 0.5, 0.5],
        },
        "expert_load_max": 2.0,
        "dead_experts": 10,
        "dropped_tokens": 0.0,
    }


def test_loads_belong_to_their_blocks_on_any_stage(prepared: Prepared, tmp_path: Path) -> None:
    flags = [*SHORT, *EXPERTS, *SOME_DENSE, *BIASED, *TWO_DEPTHS, *LAYOUTS["pp2"].split()]
    config = runs.configuration(
        tmp_path, *flags, "--parallel.virtual_pipeline_model_parallel_size", "2", "--train.micro_batch_size", "1"
    )
    run_ranks(2, with_trial, config, prepared, see_known_routing)


def see_dropping(trial: Trial, dropped: float) -> None:
    trial.prefer({f"layers.{block}": (0, 1) for block in range(4)})
    meter = ExpertMeter(trial.shape, trial.chunks, trial.ranks)
    trial.step()
    values = meter.report()
    assert values["dropped_tokens"] == dropped
    assert values["expert_load"] == {str(block): [0.5, 0.5, 0, 0] for block in range(4)}
    assert values["expert_load_max"] == 2.0


@pytest.mark.parametrize("pad, capacity, dropped", [(False, 0.5, 0.75), (True, 1.0, 0.5), param((False, 2.0, 0.0))])
def test_assignments_beyond_capacity_are_dropped(
    pad: bool, capacity: float, dropped: float, prepared: Prepared, tmp_path: Path
) -> None:
    """Two of four experts are asked for every token: each for twice its even share."""
    flags = ["--model.moe_expert_capacity_factor", str(capacity), "--model.moe_pad_expert_input_to_capacity", str(pad)]
    config = runs.configuration(tmp_path, *SHORT, *EXPERTS, *BIASED, *flags)
    run_ranks(1, with_trial, config, prepared, see_dropping, dropped)


def see_each_token_once(trial: Trial) -> None:
    meters = model_meters(trial.shape, trial.chunks, trial.ranks)
    experts, depths = meters
    assert isinstance(experts, ExpertMeter) and isinstance(depths, DepthMeter)
    trial.evaluate()
    assert experts.report() == depths.report() == {}
    for _ in range(2):  # a second time: what was reported is gone
        trial.step()
        trial.evaluate()
        microbatches, routers, tokens, topk = 4, 3 + 2, 64, 2
        assert experts.calls == microbatches * routers
        assert experts.asked == experts.assigned.sum() == microbatches * routers * tokens * topk
        noted = MTPLossLoggingHelper.tracker["total_values"]
        assert noted.tolist() == [microbatches * (tokens - 1), microbatches * (tokens - 2)]
        values = {name: torch.tensor(value) for meter in meters for name, value in meter.report().items()
                  if name in ("load_balancing_loss", "z_loss", "mtp_loss")}  # fmt: skip
        assert 0.99 < values["load_balancing_loss"] < 1.2
        assert abs(values["z_loss"] - math.log(4) ** 2) < 0.2
        assert (values["mtp_loss"] - math.log(257)).abs().max() < 0.5
    assert experts.report() == depths.report() == {}


@pytest.mark.parametrize("recompute", ["full:uniform:1", param("selective:moe")])
def test_each_token_counts_once(recompute: str, prepared: Prepared, tmp_path: Path) -> None:
    """Though activations are recomputed; those of an evaluation never."""
    config = runs.configuration(tmp_path, *ALL, "--train.recompute", recompute)
    run_ranks(1, with_trial, config, prepared, see_each_token_once)


# Sinks


LINE: dict[str, Any] = {
    "loss": 5.0,
    "mtp_loss": [5.314, math.nan],
    "expert_load": {"3": [0.25, 0.75], "mtp.0": [0.5, 0.5]},
    "expert_load_max": 1.5,
    "dropped_tokens": 0.0123,
}


def test_console_shows_experts_and_depths() -> None:
    said: list[str] = []
    ConsoleSink(said.append, 9).write(1, LINE | {"mtp_loss": [5.314, 5.4]})
    assert said == ["iteration      1/9 | loss 5.0000 | mtp 5.31 5.40 | experts 1.50x | dropped 1.2%"]


def test_jsonl_keeps_lists_and_objects(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "m")
    sink.write(1, LINE)
    sink.close()
    assert json.loads((tmp_path / "m").read_text())["mtp_loss"] == [5.314, "nan"]
    (line,) = read_jsonl(tmp_path / "m")
    assert math.isnan(line.pop("mtp_loss")[1])
    assert line == {"iteration": 1, **{name: value for name, value in LINE.items() if name != "mtp_loss"}}


def test_curves_name_blocks_and_experts() -> None:
    maxima = {"expert_load_max/block_3": 1.5, "expert_load_max/mtp.0": 1.0}
    numbers = {"loss": 5.0, "mtp_loss/depth_0": 5.314, "expert_load_max": 1.5, "dropped_tokens": 0.0123}
    experts = {"expert_load/block_3/expert_0": 0.25, "expert_load/block_3/expert_1": 0.75,
               "expert_load/mtp.0/expert_0": 0.5, "expert_load/mtp.0/expert_1": 0.5}  # fmt: skip
    line = LINE | {"mtp_loss": [5.314]}
    assert dict(curves(line, max_experts=2)) == numbers | maxima | experts
    assert dict(curves(line, max_experts=1)) == numbers | maxima


@pytest.fixture
def curves_written(tmp_path: Path) -> Iterator[set[str]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from training.metrics.trackers import TensorBoardSink

    sink = TensorBoardSink(tmp_path / "events", 0)
    sink.write(1, LINE)
    sink.close()
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    yield set(events.Tags()["scalars"])


def test_tensorboard_has_a_curve_for_each(curves_written: set[str]) -> None:
    assert curves_written == {name for name, _ in curves(LINE, max_experts=64)}
