"""The other nodes of a job: how watchers meet, what they tell one another, which are lost."""
