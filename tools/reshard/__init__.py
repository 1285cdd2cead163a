"""Checkpoints rewritten offline, on a CPU, without ranks and without building a model: ``python -m tools.reshard``.

    __main__.py        the command line
    options.py         what is asked for
    sources.py         a checkpoint to read, ours or Megatron's, by our keys
    tensors.py         tensors to write, and where each of their elements comes from
    plan.py            which tensors those are: optimizer dropped, dtypes, the vocabulary's padding
    vocabulary.py      how many rows the vocabulary gets
    rewriting.py       the work: parts of bounded size, by workers, resumable
    ours.py            our checkpoint, from the parts
    verify.py          the target against the source, element by element

    megatron_pickle.py    pickles read as data: what they name is never imported, what they call is never called
    megatron_files.py     .metadata and .distcp files: tensors by rectangle, the common state
    megatron_keys.py      Megatron's keys <-> ours: stacked, by block, by sublayer
    megatron_source.py    what of a Megatron checkpoint is what, and whether its optimizer's state is to be trusted
    megatron_blobs.py     writes .distcp files
    megatron_target.py    ``--form megatron``: .metadata, metadata.json, the common state

Bytes go from file to file in blocks of at most BLOCK_BYTES, so memory does not grow with the model. A checkpoint of
ours fits every TP, PP, DP and EP size as it is; what is rewritten here is what it holds.
"""
