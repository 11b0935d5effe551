"""Decide what is wrong and which ranks are to blame. Nothing here is made for reading."""
