"""Renderings of the verdict: one module per output."""
