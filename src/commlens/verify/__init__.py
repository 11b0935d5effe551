"""Compare every collective with the peers' before it is issued: a bad one raises on all ranks instead of hanging."""
