"""One module per file format, read or write: the black box, dumps, what was observed."""
