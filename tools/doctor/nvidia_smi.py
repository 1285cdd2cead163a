"""Ask nvidia-smi, and read its answers.

Fields and their texts are those of ``nvidia-smi --help-query-gpu`` and of the manual page nvidia-smi(1); links are
read as ``nvidia-smi nvlink --status`` prints them. Not run on a GPU yet.
"""

import csv
import re

from tools.doctor.deadline import output_of

FIELDS = (
    "index",
    "name",
    "uuid",
    "driver_version",
    "vbios_version",
    "memory.total",
    "memory.used",
    "temperature.gpu",
    "clocks.max.sm",
    "clocks_event_reasons.active",
    "power.limit",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "ecc.mode.current",
    "ecc.errors.corrected.volatile.total",
    "ecc.errors.uncorrected.volatile.total",
    "retired_pages.pending",
    "mig.mode.current",
)
OLD_NAMES = {"clocks_event_reasons.active": "clocks_throttle_reasons.active"}
"""What drivers before 535 call a field."""
ROWS = ("gpu_uuid", "remapped_rows.pending", "remapped_rows.failure")
UNKNOWN_FIELD = re.compile(r'Field "([^"]+)" is not a valid field')
LIMIT_S = 30.0
"""The first call after a boot loads the driver: seconds per GPU without the persistence daemon."""


def gpus(limit_s: float = LIMIT_S) -> list[dict[str, str]]:
    """Field -> text, one per GPU; a field that the driver does not know is missing. Raises OSError."""
    fields = list(FIELDS)
    while True:
        try:
            text = output_of(_query("gpu", fields), limit_s)
        except OSError as error:
            unknown = UNKNOWN_FIELD.search(str(error))
            if unknown is None or unknown[1] not in fields:
                raise
            place = fields.index(unknown[1])
            fields[place : place + 1] = [OLD_NAMES[unknown[1]]] if unknown[1] in OLD_NAMES else []
            continue
        new = {old: name for name, old in OLD_NAMES.items()}
        return table(text, [new.get(field, field) for field in fields])


def remapped_rows(limit_s: float = LIMIT_S) -> list[dict[str, str]]:
    """``ROWS`` of each GPU that can remap rows (A100 and newer). Raises OSError."""
    return table(output_of(_query("remapped-rows", ROWS), limit_s), ROWS)


def links(limit_s: float = LIMIT_S) -> dict[int, list[float]]:
    """GB/s of each NVLink of each GPU, 0 for one that is not active. Raises OSError."""
    return link_speeds(output_of(("nvidia-smi", "nvlink", "--status"), limit_s))


def _query(what: str, fields: list[str] | tuple[str, ...]) -> tuple[str, ...]:
    return "nvidia-smi", f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"


def table(text: str, fields: list[str] | tuple[str, ...]) -> list[dict[str, str]]:
    """CSV without header -> one dict a line. Lines of another length (warnings) are left out."""
    lines = csv.reader(text.splitlines(), skipinitialspace=True)
    return [dict(zip(fields, map(str.strip, line), strict=True)) for line in lines if len(line) == len(fields)]


def number(text: str | None) -> float | None:
    """A number, decimal or hexadecimal; None for "[N/A]", "[Not Supported]", "N/A" and the like."""
    if text is None:
        return None
    try:
        return float(int(text, 16)) if text.lower().startswith("0x") else float(text)
    except ValueError:
        return None


def link_speeds(text: str) -> dict[int, list[float]]:
    """What ``nvidia-smi nvlink --status`` prints: "GPU 0: …" and below it "Link 3: 26.562 GB/s" or "<inactive>"."""
    speeds: dict[int, list[float]] = {}
    gpu = None
    for line in text.splitlines():
        if header := re.match(r"\s*GPU (\d+):", line):
            gpu = int(header[1])
            speeds[gpu] = []
        elif gpu is not None and (link := re.match(r"\s*Link (\d+): *(.*)", line)):
            speed = re.match(r"([\d.]+) GB/s", link[2])
            speeds[gpu].append(float(speed[1]) if speed else 0.0)
    return speeds
