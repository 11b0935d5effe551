"""The programs of the scenarios that only tests and benchmarks run."""
