"""Files of other tools: one reader for each format, all of which return the same columns."""
