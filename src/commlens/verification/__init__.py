"""Strict verification: compare each collective with the peers' before it is issued, and raise on
all ranks instead of hanging.
"""
