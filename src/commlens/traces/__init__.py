"""Work with finished traces: read, filter, summarise, compare, and assert on them in tests. No
torch.
"""
