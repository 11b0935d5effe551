"""Readers of other tools' files, one per format, which all return the same columns."""
