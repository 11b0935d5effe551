"""Which collectives of the ranks belong together."""
