"""The rules that ranks' collectives must agree by, in one place for diagnosis, the watcher and
verification.

Pure functions of partial evidence. A rank whose evidence lacks an aspect (no reduce op, no tensors)
is left out of the comparison of that aspect; missing evidence never makes a disagreement.
"""
