"""Views of a job without a verdict: status, entries, differences of dumps."""
