"""Starting programs with commlens: torchrun for a node, one worker, and the switches of
recording.
"""
