"""``commlens.CommDebugMode``, a drop-in replacement for PyTorch's context manager."""
