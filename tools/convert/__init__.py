"""Hugging Face folders <-> checkpoints, on a CPU, without building a model: ``python -m tools.convert``.

    __main__.py     the command line
    checking.py     whether the tables cover all of it, before anything is written
    importing.py    its rows into pieces of a checkpoint
    exporting.py    rows of a checkpoint into sharded safetensors
    verify.py       each again in the other direction, compared byte by byte
    generation.py   which ids begin and end a text, in an exported folder
    cut.py          a folder cut down to one block of each kind
    logits.py       both models' logits, each from a process of its own

What reshard, parity, generate and inspect_checkpoint read as well is in tools/shared: hf_folder (a Hugging Face folder,
to read), carried_tokenizer, checked_checkpoint, dtypes, part_files, resumable.

Bytes go from file to file in blocks of at most BLOCK_BYTES; no tensor is ever whole in memory but GPT-2's, whose
matrices are turned. Safetensors files are read and written here directly: their reader for numpy knows no bfloat16,
and memory-mapped pages would count as the worker's memory.
"""
