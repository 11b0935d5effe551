"""The programs: ordinary training scripts. The lines of each fault are marked ``# fault: NAME``."""
