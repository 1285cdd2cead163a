"""What physics leaves open: efficiencies that published runs, or ``calibrate``, tell.

Each begins at what its own measurements in public say (the prior), and is moved by the runs of
``backtest/published.csv`` only as far as they insist; ``fitted.toml`` holds the result.
"""

from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

from program.untrusted import read_toml

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
    first_kernels: float = 0.85
    """The rest of that, of attention's share, and of a block's memory traffic but for its experts', while a
    generation of cards is new."""
    tuning_years: float = 1.0
    """In which half of what is missing then (as a logarithm) is won."""
    product_bytes: float = 1.0
    """Share of a product's bytes that its multiplications do not hide: tiles are loaded before they start, and written
    when they are done. 1 where nothing hides them."""
    misaligned: float = 0.85
    """Share left where a local dim is no multiple of 64."""
    launch_s: float = 6e-6
    """Between two kernels, seconds."""
    blocked_s: float = 50e-6
    """The same where the host waits for each kernel before it launches the next. One source alone tells it, and what
    else its 71 runs have in common would be in it, too, were it not tied to its prior as closely as the others."""
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
    flash_ultra: float = 1.4
    """Times as fast where exponentials are: NVIDIA promises up to 2 for GB300 and B300 against GB200 and B200."""
    fp8_attention: float = 1.3
    """Times as fast where attention multiplies in fp8 (Transformer Engine's fp8_dot_product_attention)."""
    flash_2: float = 0.38
    """FlashAttention 2's kind of kernels on Hopper and later."""
    flash_ramp: float = 512.0
    """Keys that flash attention's start and end cost: share s / (s + flash_ramp)."""
    score_passes: float = 6.0
    """Times that scores cross memory in a forward pass without flash attention."""
    nics: float = 0.75
    """Share of the adapters' bandwidth that collectives reach."""
    collective_s: float = 20e-6
    """Of a collective beside its bytes and hops: kernels start on all ranks, and wait for each other. Seconds. An
    all-reduce, which is two, took 46 to 79 us within 2 to 8 A100 (vTrain's tables, trace/a100)."""
    tp_exposed: float = 0.6
    """Share of TP's collectives, and of tokens' ways to experts, that overlapping leaves exposed."""
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
    expert_gemm: float = 0.85
    """An expert's products against a dense layer's of the same shape."""
    expert_gemm_fused: float = 0.9
    """The same of one kernel for all experts, with their quantisation and activation."""
    expert_traffic: float = 3.0
    """Times the bytes that experts' activations and casts must move: each expert's are a kernel of their own."""
    fused_experts: float = 0.5
    """What one kernel for all leaves of that, and of sorting tokens."""
    expert_host_s: float = 3e-3
    """That a host needs to launch a layer with experts forward, without graphs: no layer is faster. Seconds."""
    expert_wait_s: float = 4e-4
    """That a GPU idles in each such layer while the host learns the counts of tokens. Seconds."""
    dispatch: float = 0.6
    """Share of the links' bandwidth that the all-to-all of tokens reaches."""
    imbalance: float = 1.15
    """The fullest expert rank against the mean, where nothing forces balance. Assumed: published runs force it."""


EXPERTS_ONLY = (
    "fp8_attention", "expert_gemm", "expert_gemm_fused", "expert_traffic", "fused_experts", "expert_host_s",
    "expert_wait_s", "dispatch",
)  # fmt: skip
"""Those that only models with experts can tell."""
ASSUMED = ("imbalance",)
"""Those that no published run tells."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Interval:
    """Measured over predicted time: four of five published runs that the constants had not seen lie within it."""

    low: float
    high: float
    runs: int


HYBRIDS = Interval(low=0.85, high=1.4, runs=0)
"""Assumed, and not four of five. No constant is fitted to a scan; priced letter by letter, 15 published runs of
Nemotron 3 Nano (Megatron-Bridge, GB200, GB300, B300) took 1.01 to 1.11 times as long, and Mamba-2 1.3B, by mamba_ssm's
own modules, which fuse less, 1.24 (A100) and 1.4 times (H200; state-spaces/mamba issue 904) (2026-11-25)."""


@cache
def interval(kind: str) -> Interval:
    """Of "dense" models or those with "experts"; of "hybrids", which no published run is priced as, ``HYBRIDS``."""
    if kind == "hybrids":
        return HYBRIDS
    if not FITTED.exists():
        return Interval(low=0.8, high=1.25, runs=0)
    values = read_toml(FITTED)["intervals"][kind]
    return Interval(low=values["low"], high=values["high"], runs=values["runs"])


@cache
def fitted() -> Constants:
    """The constants that ship with the planner."""
    if not FITTED.exists():
        return Constants()
    values = read_toml(FITTED)["constants"]
    return Constants(**{field.name: float(values[field.name]) for field in fields(Constants)})
