"""Jobs that commlens does not record, seen from outside: find their ranks, sample their stacks, and
give a verdict.
"""
