"""Processes seen from outside: their state in /proc, their cgroup, their stacks, and observations
over time.
"""
