"""Check a program before it runs: every rank's sequence of calls, put together by the rules of a
backend.
"""
