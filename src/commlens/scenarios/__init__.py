"""Small real programs, healthy or with one fault at a known rank and line, for the demo, the tests and the benchmarks.

``python -m commlens.scenarios NAME`` is one worker of a scenario; rank and world size come from torchrun's environment.
Only the programs, and the modules that only they import, need torch.
"""

from commlens.scenarios.registry import DEFAULT, SCENARIOS, Ending, Scenario, find
from commlens.scenarios.truth import Truth

__all__ = ["DEFAULT", "SCENARIOS", "Ending", "Scenario", "Truth", "find"]
