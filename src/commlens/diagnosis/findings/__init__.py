"""The findings of a verdict: one module for each kind."""
