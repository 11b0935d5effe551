"""Reports: one module for each output. They draw examined jobs, traces and dumps, and diagnose
nothing.
"""
