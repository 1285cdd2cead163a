"""A Megatron-LM command line or launch script becomes a Triplane recipe, with nothing dropped silently.

A script is read, never run: ``statements`` cuts it into commands, ``script`` follows them (with ``words``)
to the one that starts Megatron-LM and counts its ranks. ``arguments`` reads that command's flags by the tables in
``flags*``; ``translate`` and its ``rules_*`` make a ``draft`` of them, as TOML.
"""
