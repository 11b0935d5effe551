"""PyTorch's Flight Recorder: dumps as pickle or JSON, of NCCL, gloo and other backends, format
versions 2.0 to 2.10 and later.
"""
