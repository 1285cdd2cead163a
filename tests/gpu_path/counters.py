"""What the emulated device has counted in this process (device/calls.h)."""

import ctypes
import enum


class Count(enum.IntEnum):
    """Places in its table. REGISTERED is how many ranges of host memory are registered now; the others only grow."""

    LAUNCHES = 0
    STREAM_WAITS = 1
    DEVICE_WAITS = 2
    EVENT_WAITS = 3
    COPIES_TO_HOST = 4
    COPIES_TO_DEVICE = 5
    COLLECTIVES = 6
    REGISTERED = 7


def counts() -> dict[Count, int]:
    """Since the process began."""
    table = (ctypes.c_long * len(Count))()
    ctypes.CDLL(None).emulated_cuda_counts(table)
    return {kind: table[kind] for kind in Count}
