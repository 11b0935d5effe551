"""Dumps of any origin, written for other tools: one module for each format."""
