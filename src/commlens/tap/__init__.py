"""The function that every collective of the process passes through, and the data that it gives to
its subscribers.
"""
