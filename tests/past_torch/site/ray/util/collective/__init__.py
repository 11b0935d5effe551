"""A stand-in, see tests/past_torch/README.md."""
