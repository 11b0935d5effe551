"""Write dumps of any origin, and traces as timelines, for other tools."""
