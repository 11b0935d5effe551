"""Tracing inside the training process: which collectives a model issues, when, why, and how many
bytes.
"""
