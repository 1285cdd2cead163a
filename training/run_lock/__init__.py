"""One run per folder: who owns a run's folder, whether that run is alive, and proof before a commit.

    lock            take the folder, or be refused while its owner lives; ``RunLock.still_owns`` and ``fenced`` for
                    the process that commits
    record          ``owner.json``: which process of which job owns the folder
    lock_heartbeat  a small process that counts while the owner lives, for newcomers on other hosts

In a run's folder:

    owner.json                  the owner; without it the folder is free
    owner.ATTEMPT.heartbeat     its counter. Not in owner.json: a heartbeat that was suspended and woke up would
                                overwrite its successor's record there
    .owner.released             the attempt that gave the folder back: what its writers still hold, they may commit
    owner.after-ATTEMPT         the successor of a dead owner; gone when owner.json names it

Taking the folder is one link(2), which fails where the name exists, also between hosts of an NFS server: a free
folder is taken by linking ``owner.json``, a dead owner's by linking ``owner.after-ATTEMPT``. The owner is the end
of that chain, so of any number of newcomers one wins. No lock is held, so none is left behind by a kill, and
nothing depends on the clocks of two hosts being alike.
"""
