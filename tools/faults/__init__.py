"""What Triplane survives, tried many times with a seed: docs/faults.md says what was injected and what came of it.

    damages   files of a checkpoint changed in every way, on ranks that then load it
    kills     processes of a real run killed around saving, and the run started again
    matrix    saved in one layout, loaded in every other
    disk      full, out of names, read-only, gone
    hostile   files, flags and surroundings made to break things

A campaign is a list of seeded cases; each leaves one Result. The test suite runs a few cases of each through the
same functions.
"""
