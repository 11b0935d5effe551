"""Small real programs, each with one fault at a known rank and line, and healthy ones. The demo, the tests and the benchmarks run them.

``python -m commlens.scenarios NAME`` is one worker of a scenario; rank and world size come from torchrun's environment.
Nothing here but the programs themselves, and what only they import, needs torch.
"""

from commlens.scenarios.registry import DEFAULT, SCENARIOS, Ending, Scenario, find
from commlens.scenarios.truth import Truth

__all__ = ["DEFAULT", "SCENARIOS", "Ending", "Scenario", "Truth", "find"]
