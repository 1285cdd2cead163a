"""What NVML knows of this rank's GPU: utilisation, clock, power, energy, temperature, and why it is slowed down.

NVML API reference: https://docs.nvidia.com/deploy/nvml-api. Not run on a GPU yet; tests read a stand-in library.
"""

import math
from collections.abc import Callable

import pynvml

SLOWED_BY_HARDWARE = (
    pynvml.nvmlClocksEventReasonSwThermalSlowdown
    | pynvml.nvmlClocksThrottleReasonHwSlowdown
    | pynvml.nvmlClocksThrottleReasonHwThermalSlowdown
    | pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
)
"""Heat, or a power supply that asks for less: a sound node shows none of them."""
POWER_CAPPED = pynvml.nvmlClocksEventReasonSwPowerCap
"""At the limit that the card is set to, as it is under dense matrix products."""

NAMES = (
    "gpu_utilization",
    "gpu_sm_clock_mhz",
    "gpu_throttled",
    "gpu_power_capped",
    "gpu_power_w",
    "gpu_energy_j",
    "gpu_temperature_c",
)


class GpuSensor:
    """One GPU. What NVML does not answer, of a MIG slice or an old card, is NaN; it never raises.

    A reading takes seven calls into the driver and no wait for the device.
    """

    def __init__(self, uuid: str) -> None:
        """uuid: ``torch.cuda.get_device_properties(device).uuid``: NVML's numbers ignore CUDA_VISIBLE_DEVICES."""
        self.handle = _answer(lambda: _open(uuid))
        self.newest_sample_us = 0
        self.energy_mj = self._energy()

    def read(self) -> dict[str, float]:
        """Now, or, for utilisation and energy, since the last reading."""
        before, self.energy_mj = self.energy_mj, self._energy()
        reasons = self._number(pynvml.nvmlDeviceGetCurrentClocksEventReasons)
        known = not math.isnan(reasons)
        values = (
            self._utilization(),
            self._number(lambda gpu: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM)),
            float(int(reasons) & SLOWED_BY_HARDWARE != 0) if known else math.nan,
            float(int(reasons) & POWER_CAPPED != 0) if known else math.nan,
            self._number(pynvml.nvmlDeviceGetPowerUsage) / 1e3,  # mW
            (self.energy_mj - before) / 1e3,
            self._number(lambda gpu: pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU)),
        )
        return dict(zip(NAMES, values, strict=True))

    def _utilization(self) -> float:
        """Mean of the samples that the driver took since the last reading (it keeps about 100, six a second)."""
        kind = pynvml.NVML_GPU_UTILIZATION_SAMPLES
        found = _answer(lambda: pynvml.nvmlDeviceGetSamples(self.handle, kind, self.newest_sample_us))
        samples = [one for one in found[1] if one.timeStamp > self.newest_sample_us] if found else []
        if not samples:
            return math.nan
        self.newest_sample_us = max(one.timeStamp for one in samples)
        return sum(one.sampleValue.uiVal for one in samples) / len(samples) / 100

    def _energy(self) -> float:
        """mJ since the driver was loaded."""
        return self._number(pynvml.nvmlDeviceGetTotalEnergyConsumption)

    def _number(self, ask: Callable[[object], float]) -> float:
        answer = _answer(lambda: ask(self.handle)) if self.handle is not None else None
        return math.nan if answer is None else float(answer)


def _open(uuid: str) -> object:
    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")


def _answer[T](ask: Callable[[], T]) -> T | None:
    try:
        return ask()
    except pynvml.NVMLError:
        return None
