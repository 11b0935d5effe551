"""A job's records, indexed: by rank, group and number."""
