"""The relay of a node: strict verification between nodes. One rank of the node starts ``python -m
commlens.verification.relay``.

It is a process of its own, so that neither a rank that holds the GIL nor one that dies stops it. It
imports no torch.
"""
