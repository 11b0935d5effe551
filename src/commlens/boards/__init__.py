"""Shared memory in which the ranks of a node announce their calls, and what travels beside it."""
