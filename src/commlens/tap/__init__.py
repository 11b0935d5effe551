"""The one function that every collective of the process passes, and the data that its subscribers get."""
