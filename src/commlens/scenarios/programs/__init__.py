"""The programs: ordinary training scripts, in each of which one scenario's fault is marked ``# fault: NAME``."""
