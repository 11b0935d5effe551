"""The other nodes of a job: how watchers meet, what they exchange, which are lost."""
