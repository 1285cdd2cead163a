"""What physics leaves open: efficiencies that published runs, or ``--calibrate``, tell. No torch here.

Each begins at what its own measurements in public say (the prior), and is moved by the runs of
``backtest/published.csv`` only as far as they insist; ``fitted.toml`` holds the result.
"""

import tomllib
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

FITTED = Path(__file__).with_name("fitted.toml")


@dataclass(kw_only=True, slots=True, frozen=True)
class Constants:
    """Shares are of a datasheet's figure. The values here are the priors."""

    gemm_ampere: float = 0.85
    """Large aligned matrix products: share of peak."""
    gemm_hopper: float = 0.72
    gemm_hopper_fp8: float = 0.60
    gemm_blackwell: float = 0.72
    gemm_blackwell_fp8: float = 0.62
    """fp8 with a scale per tensor."""
    gemm_blackwell_mxfp8: float = 0.55
    """fp8 with a scale per 32 elements: more to quantise, and to multiply by."""
    gemm_blackwell_fp4: float = 0.45
    first_year: float = 0.88
    """What is left of that in the first year of a generation of cards."""
    k_ramp: float = 128.0
    """Columns that a product's start and end cost: share K / (K + k_ramp)."""
    m_ramp: float = 128.0
    """The same of rows: tokens."""
    misaligned: float = 0.85
    """Share left where a local dim is no multiple of 64."""
    launch_s: float = 6e-6
    """Between two kernels, seconds."""
    traffic_fused: float = 1.2
    """Times the bytes that norms, activations and residuals must move."""
    traffic_plain: float = 2.0
    """The same where little is fused."""
    traffic_cast: float = 1.0
    """The same of casts to fp8 and smaller."""
    flash_ampere: float = 0.58
    """Flash attention, forward: share of the 16-bit peak."""
    flash_hopper: float = 0.58
    flash_blackwell: float = 0.55
    flash_2: float = 0.38
    """FlashAttention 2's kind of kernels on Hopper and later."""
    flash_ramp: float = 512.0
    """Keys that flash attention's start and end cost: share s / (s + flash_ramp)."""
    score_passes: float = 6.0
    """Times that scores cross memory in a forward pass without flash attention."""
    scale_up: float = 0.75
    """Share of NVLink's bandwidth that collectives reach."""
    nics: float = 0.75
    """Share of the adapters' bandwidth that collectives reach."""
    tp_exposed: float = 0.6
    """Share of TP's collectives that overlapping leaves exposed."""
    contention: float = 0.15
    """Share of a hidden collective's time that it costs what runs beside it."""
    dp_plain: float = 1.0
    """Times the time of a data-parallel reduction that is not overlapped: unbucketed copies and casts."""
    p2p: float = 1.0
    """Times the time of sends between stages that nothing hides."""
    p2p_hidden: float = 0.25
    """The same of sends that overlap with an interleaved schedule."""
    optimizer: float = 1.5
    """Times the bytes that an optimizer step must move."""
    fixed_s: float = 0.02
    """Of every step: logging, data, host synchronisation. Seconds."""
    jitter: float = 0.005
    """More time for each doubling of the GPUs beyond 8: the slowest sets the pace."""
    expert_gemm: float = 0.75
    """Grouped products of experts against a single one of the same rows."""
    expert_gemm_fused: float = 0.9
    """The same where each expert's quantisation and activation are fused into them."""
    expert_traffic: float = 1.5
    """Times the bytes that routing and permuting tokens must move."""
    expert_host_s: float = 3e-3
    """That a host needs to launch a layer of experts forward, and to wait for the counts of tokens. Seconds."""
    fused_experts: float = 0.5
    """What fused experts leave of that traffic."""
    dispatch: float = 0.6
    """Share of the links' bandwidth that the all-to-all of tokens reaches."""
    imbalance: float = 1.15
    """The fullest expert rank against the mean, where nothing forces balance."""


EXPERTS_ONLY = (
    "expert_gemm",
    "expert_gemm_fused",
    "expert_traffic",
    "expert_host_s",
    "fused_experts",
    "dispatch",
    "imbalance",
)
"""Those that only models with experts can tell."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Interval:
    """Measured over predicted time: four of five published runs that the constants had not seen lie within it."""

    low: float
    high: float
    runs: int


@cache
def interval(kind: str) -> Interval:
    """Of "dense" models or those with "experts"."""
    if not FITTED.exists():
        return Interval(low=0.8, high=1.25, runs=0)
    values = tomllib.loads(FITTED.read_text())["intervals"][kind]
    return Interval(low=values["low"], high=values["high"], runs=values["runs"])


@cache
def fitted() -> Constants:
    """The constants that ship with the planner."""
    if not FITTED.exists():
        return Constants()
    values = tomllib.loads(FITTED.read_text())["constants"]
    return Constants(**{field.name: float(values[field.name]) for field in fields(Constants)})
