"""What is in a checkpoint, whether it is whole, how two differ, and the mean of several: no torch, no model built.

    __main__.py     the command line: ``python -m tools.inspect_checkpoint``
    catalogue.py    the checkpoints of a folder, complete or not; what one says of itself; damage
    contents.py     its tensors by parameter: weights, masters, moments, generators' states
    tree.py         these as a table, equal blocks folded
    numbers.py      blocks of tensors, and statistics of them
    compare.py      two checkpoints, tensor by tensor and field by field, and what differs as text
    average.py      the mean of several
    text.py         sizes and columns

No tensor is ever whole in memory: all is read in blocks of at most BLOCK_ELEMENTS.
"""
