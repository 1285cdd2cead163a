"""The planner's prediction beside the measured steps, from what it measures itself on this card."""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

from tests.gpu import measured_models
from tests.gpu.subject_run import SubjectRun, UnrunError
from tools import clusters
from tools.clusters import Cluster
from tools.plan.search.pricing import price
from tools.plan.search.request import PlanRequest
from training.config.run_config import RunConfig
from training.memory.planned import candidate


def planner(run: SubjectRun) -> None:
    """Calibrated on all GPUs; a row for each row of throughput that was measured."""
    cluster = calibrated(run)
    rows = run.earlier.get("throughput", {}).get("numbers", {}).get("rows", {})
    if not rows:
        raise UnrunError("no row of throughput was measured: there is nothing to hold a prediction against")
    run.say(f"{'':6} {'predicted s':>11} {'measured s':>10} {'ratio':>6}  most of it")
    run.numbers["rows"] = {}
    for row, found in rows.items():
        run.part(row, lambda row=row, found=found: one_row(run, row, found, cluster))  # type: ignore[misc]


def calibrated(run: SubjectRun) -> Cluster:
    """As ``python -m tools.plan calibrate`` writes it: a minute of products, a copy, and, of several GPUs, links."""
    text = run.measured("calibration", len(run.machine.gpus), card_products=run.sizes.card_products)[0]
    return loaded_cluster(run, text)


def loaded_cluster(run: SubjectRun, text: str) -> Cluster:
    """A cluster file's, of this subject or of an earlier one."""
    run.note("cluster", text)
    with tempfile.TemporaryDirectory(prefix="triplane-cluster-") as folder:
        path = Path(folder, "measured.toml")
        path.write_text(text)
        cluster = clusters.load(str(path))
    peaks = ", ".join(f"{name} {value:.4g}" for name, value in cluster.gpu.peak_tflops.items())
    run.say(f"calibrated: peak TFLOPS {peaks}; memory {cluster.gpu.memory_gb_per_s:,.0f} GB/s")
    return cluster


def one_row(run: SubjectRun, row: str, found: dict[str, Any], cluster: Cluster) -> None:
    """A line."""
    predicted_s, limit = prediction(measured_models.loaded(found["recipe"]), cluster, run)
    ratio = predicted_s / found["step_s"]
    run.numbers["rows"][row] = {"predicted_s": predicted_s, "measured_s": found["step_s"], "ratio": ratio}
    run.headline = ", ".join(f"{name} {one['ratio']:.2f}" for name, one in run.numbers["rows"].items())
    run.headline += " of the measured step"
    run.say(f"{row:6} {predicted_s:11.4g} {found['step_s']:10.4g} {ratio:6.2f}  {limit}")


def prediction(config: RunConfig, cluster: Cluster, run: SubjectRun) -> tuple[float, str]:
    """Seconds of a step, and what takes most of it."""
    if config.precision.products and "fp8" not in cluster.gpu.peak_tflops:
        gemm = run.earlier["throughput"]["numbers"].get("gemm_tflops", {})
        if "fp8" not in gemm:
            raise UnrunError("calibrate measures no fp8 products, and throughput had none")
        # as much above the measured products as bf16's peak is
        peaks = cluster.gpu.peak_tflops
        peaks = peaks | {"fp8": gemm["fp8"] * peaks["bf16"] / gemm["bf16"]}
        cluster = dataclasses.replace(cluster, gpu=dataclasses.replace(cluster.gpu, peak_tflops=peaks))
    gpus, layers = len(run.machine.gpus), measured_models.shape_of(config).num_layers
    question = PlanRequest(
        model=config.model, cluster=cluster, num_gpus=gpus, global_batch_size=config.train.global_batch_size
    )
    (plan,) = price(question, [candidate(config, gpus, layers)])
    return plan.step_s, plan.limit
