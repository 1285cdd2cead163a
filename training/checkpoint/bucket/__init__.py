"""A run's checkpoints in object storage (``checkpoint.bucket``). RUN_DIR/checkpoints stays the first copy.

    stored      what lies in a bucket: folders, manifests, which of them counts
    fetching    a start from a bucket: by all ranks together, each its share of the files
    uploading   what a bucket lacks, and what it has too much, put right
    process     the program beside the first rank of each node that does so
    callback    the rank's side of it: starts the program, hears it, and waits for it at the end

PREFIX/owner.json                                        the start that writes here
PREFIX/checkpoints/iter_0000100-1a2b3c4d/rank_00000.bin  files as in RUN_DIR/checkpoints/iter_0000100
PREFIX/checkpoints/iter_0000100-1a2b3c4d/manifest.json   the last one: without it there is no checkpoint
PREFIX/checkpoints/latest                                the name of the newest: for people, and where a listing lags

A folder there is named after its manifest's hash, too. So nothing is ever replaced: a killed upload goes on where it
was, what it left of a future that was given up is not mixed with another's files of the same sizes, and a start that
was taken for dead and wakes up can only write again what is there.
"""
