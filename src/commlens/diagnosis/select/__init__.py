"""Which dumps and which job are diagnosed."""
