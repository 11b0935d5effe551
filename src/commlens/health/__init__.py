"""The facts that a node knows about its hardware, readable without privileges: the kernel's log,
the counters of networks and GPUs, memory and storage, and NCCL's RAS service.
"""
