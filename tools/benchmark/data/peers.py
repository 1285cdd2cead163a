"""Other loaders on the same samples, where they are installed; where they are not, that is said."""

import shutil
from pathlib import Path

import numpy as np

from data.prepared import Samples
from tools.benchmark.data.table import cpu_s

Found = tuple[float | None, str]
"""Samples for each CPU-second; or None, and why."""


def mosaic(source: Samples, folder: Path, samples: int) -> Found:
    """MosaicML Streaming, from local shards, sample by sample."""
    try:
        from streaming import MDSWriter, StreamingDataset
    except ImportError:
        return None, "peer missing: pip install mosaicml-streaming"
    except Exception as error:  # it does not import with every version of what it depends on
        return None, f"peer cannot be imported: {type(error).__name__}: {error}"
    local = folder / "mosaic"
    shutil.rmtree(local, ignore_errors=True)
    tokens = source.fetch(np.arange(samples))
    with MDSWriter(out=str(local), columns={"tokens": "ndarray:int32"}) as writer:
        for row in tokens:
            writer.write({"tokens": row})
    dataset = StreamingDataset(local=str(local), shuffle=True, batch_size=8)
    return samples / cpu_s(lambda: [dataset[index] for index in range(samples)]), ""


def litdata(source: Samples, folder: Path, samples: int) -> Found:
    """litdata's TokensLoader, from local chunks, sample by sample."""
    try:
        from litdata import StreamingDataset, TokensLoader
        from litdata.streaming import writer as chunks
    except ImportError:
        return None, "peer missing: pip install litdata"
    except Exception as error:
        return None, f"peer cannot be imported: {type(error).__name__}: {error}"
    import torch

    local = folder / "litdata"
    shutil.rmtree(local, ignore_errors=True)
    length = source.seq_length + 1
    binary = chunks.BinaryWriter(str(local), chunk_size=length * 1024, item_loader=TokensLoader(block_size=length))
    for number, row in enumerate(source.fetch(np.arange(samples))):
        binary[number] = torch.from_numpy(row)
    binary.done()
    binary.merge()
    dataset = StreamingDataset(str(local), item_loader=TokensLoader(block_size=length), shuffle=True)
    count = len(dataset)
    return count / cpu_s(lambda: [None for _ in dataset]), ""
