"""Finds the ops that touch a buffer of an asynchronous collective before the wait for it."""
