"""Examine a machine, or the nodes of a job, before training on them.

A subject is a module with ``look`` (on each node, one ``NodeCheck``) and, where nodes must agree, ``compare`` (on the
first node, with every node's facts). ``examine`` runs them; the nodes meet by ``tcp_rendezvous``.
"""
