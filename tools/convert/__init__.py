"""Hugging Face folders <-> checkpoints, on a CPU, without building a model: ``python -m tools.convert``.

    __main__.py     the command line
    source.py       a Hugging Face folder, to read: config.json, tensors by rows, what else lies there
    headers.py      which tensors its safetensors files hold, and where
    checking.py     whether the tables cover all of it, before anything is written
    row_blocks.py   our tensors in blocks, made of rows of theirs; blocks in files of bounded size
    importing.py    its rows into pieces of a checkpoint
    checked.py      a checkpoint, of which no damaged byte is taken
    exporting.py    rows of a checkpoint into sharded safetensors
    verify.py       each again in the other direction, compared byte by byte
    generation.py   which ids begin and end a text, in an exported folder
    dtypes.py       elements of one dtype as another's
    resumable.py    unfinished folders, workers, progress
    tokenizer.py    the carried tokenizer, as training opens it
    cut.py          a folder cut down to one block of each kind
    logits.py       both models' logits, each from a process of its own

Bytes go from file to file in blocks of at most BLOCK_BYTES; no tensor is ever whole in memory but GPT-2's, whose
matrices are turned. Safetensors files are read and written here directly: their reader for numpy knows no bfloat16,
and memory-mapped pages would count as the worker's memory.
"""
