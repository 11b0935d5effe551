"""Dumps of any origin: discover, classify, read and save them."""
