"""The files of a checkpoint, format 2: bytes of rectangles of global tensors, JSON about them, and nothing that runs.

iter_0000100/
    rank_00000.bin ...   one file per writer: the bytes of its pieces, one after another, then a table of them
    pieces.jsonl         for each tensor, a line with its pieces: file, position, place in the global tensor, hash
    index.json           for each tensor its dtype, its global shape and its line in pieces.jsonl
    manifest.json        sizes and hashes of all files and of itself: written last; without it nothing here counts
    state.json ...       what the caller adds

Every rank writes its own file and knows nothing of the others; the process that commits puts the tables together, in
time linear in the pieces. A reader opens the index and the lines of the tensors it wants. Nothing here needs torch, and
nothing that is read can execute anything.
"""
