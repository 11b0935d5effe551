"""The relay of a node: strict verification between nodes. One rank of the node starts ``python -m
commlens.verification.relay``.

It runs in a process of its own, so it does not stop if a rank holds the GIL or dies. It imports no
torch.
"""
