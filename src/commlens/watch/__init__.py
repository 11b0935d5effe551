"""The watcher: reads black boxes and ``/proc`` from outside the ranks, and reports stalls, deaths
and mismatches.
"""
