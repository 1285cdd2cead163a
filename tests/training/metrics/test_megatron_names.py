"""Curves by Megatron-LM's names and in its units."""

import importlib.util
import math
from pathlib import Path

import pytest

from training.config.log_config import LogConfig
from training.metrics.registry import METRICS, megatron_name, named_curves
from training.metrics.sinks import RunFacts, open_sinks
from training.metrics.values import Values

THEIRS = {
    "learning-rate", "batch-size", "lm loss", "lm loss validation", "loss-scale", "grad-norm", "num-zeros",
    "params-norm", "mem-max-allocated-bytes", "iteration-time", "throughput", "iter-energy/gpu", "power/gpu",
    "load_balancing_loss", "z_loss", "max_attention_logit",
}  # fmt: skip
"""Of ``training_log`` in Megatron-LM's megatron/training/training.py at d98e8a64 (2026-08-22), and of megatron-core's
moe_logging.py, as far as they are the same as ours."""


def test_the_registry_names_only_what_megatron_has() -> None:
    named = {one.megatron for one in METRICS.values() if one.megatron and "*" not in one.megatron}
    assert named <= THEIRS and len(named) >= len(THEIRS) - 1


def test_megatron_core_writes_the_names_that_are_its_own() -> None:
    """Of the version that is installed."""
    found = importlib.util.find_spec("megatron.core")
    assert found is not None and found.submodule_search_locations
    transformer = Path(found.submodule_search_locations[0]) / "transformer"
    assert 'f"mtp_{i+1} loss"' in (transformer / "multi_token_prediction.py").read_text()
    text = (transformer / "moe/router.py").read_text()
    assert '"load_balancing_loss"' in text and '"z_loss"' in text


LINE: Values = {
    "loss": 2.0, "memory_gib": 1.5, "mtp_loss": [3.0, 4.0], "iteration_s": 0.5, "expert_load": {"1": [0.5, 0.5]},
    "mfu": 0.4, "time_s": 1.0,
}  # fmt: skip
EXPECTED = {
    "lm loss": 2.0, "mem-max-allocated-bytes": 1.5 * 2**30, "mtp_1 loss": 3.0, "mtp_2 loss": 4.0, "iteration-time": 0.5,
    "expert_load_max/block_1": 1.0, "mfu": 0.4,
}  # fmt: skip


def test_names_and_units() -> None:
    assert dict(named_curves(LINE, 0, "megatron")) == EXPECTED
    assert dict(named_curves(LINE, 0, "triplane"))["loss"] == 2.0


@pytest.mark.parametrize(("loss", "ppl"), [(1.0, math.e), (50.0, math.exp(20)), (math.nan, math.nan)])
def test_a_validation_has_a_perplexity_too_as_large_as_megatrons_at_most(loss: float, ppl: float) -> None:
    found = dict(named_curves({"validation_loss": loss}, 0, "megatron"))
    assert found == pytest.approx({"lm loss validation": loss, "lm loss validation ppl": ppl}, nan_ok=True)


def test_of_a_starred_name_the_part_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    from training.metrics import registry

    starred = registry.Metric(
        name="toy_loss/*", unit="", reduce="mean", meaning="toy", megatron="toy loss-*", megatron_scale=2.0
    )
    monkeypatch.setitem(registry.METRICS, "toy_loss/*", starred)
    registry._patterns.cache_clear()
    assert megatron_name("toy_loss/wiki") == ("toy loss-wiki", 2.0)
    monkeypatch.undo()
    registry._patterns.cache_clear()


def test_tensorboard_and_mlflow_get_them_and_metrics_jsonl_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow.tracking import MlflowClient

    said: list[str] = []
    log = LogConfig(names="megatron", mlflow="offline", prometheus="off")
    sinks = open_sinks(tmp_path, log, RunFacts(train_iters=9), said.append)
    sinks.write(9, LINE)
    sinks.close()
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert {name: events.Scalars(name)[0].value for name in events.Tags()["scalars"]} == pytest.approx(
        EXPECTED | {"expert_load/block_1/expert_0": 0.5, "expert_load/block_1/expert_1": 0.5}
    )
    client = MlflowClient((tmp_path / "mlflow").as_uri())
    run = client.get_run((tmp_path / "mlflow_run_id").read_text().strip())
    each = {name.replace("expert_load_max/", "expert_load_max_each/"): value for name, value in EXPECTED.items()}
    assert run.data.metrics == each
    assert '"loss": 2.0' in (tmp_path / "metrics.jsonl").read_text()
    assert not [line for line in said if "off" in line]
