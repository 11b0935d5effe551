"""The programs: ordinary training scripts. Each marks the scenario's fault with ``# fault: NAME``."""
