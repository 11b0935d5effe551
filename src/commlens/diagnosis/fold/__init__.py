"""Large jobs: a few ranks are examined for all that are in the same state."""
