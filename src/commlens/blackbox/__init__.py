"""The black box in shared memory: its layout, writer and readers, and the boards and wake-up words
that ranks verify with.
"""
