"""How long best-fit packing takes, and what it wastes, of documents whose lengths are drawn from a log-normal
distribution (median 500 tokens, mean 1,200):

    python -m tests.benchmarks.data.packing
"""

import resource
import time

import numpy as np

from data.packing import best_fit, waste

SEED, LOG_MEAN, LOG_DEVIATION = 0, 6.2, 1.3


def main() -> None:
    """One line for each number of documents and length of samples."""
    for documents, seq_length in ((1_000_000, 4096), (1_000_000, 131_072), (10_000_000, 4096)):
        drawn = np.random.default_rng(SEED).lognormal(LOG_MEAN, LOG_DEVIATION, documents)
        lengths = drawn.astype(np.int64) + 1
        start_s = time.perf_counter()
        best_fit(lengths, seq_length + 1)
        took_s = time.perf_counter() - start_s
        peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"seq_length {seq_length:,}: {waste(lengths, seq_length + 1)}; {took_s:.1f} s, peak {peak_gib:.1f} GiB")


if __name__ == "__main__":
    main()
