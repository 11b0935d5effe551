"""Write dumps of any origin for other tools: one module for each format."""
