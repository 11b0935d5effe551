"""One worker of a scenario: ``torchrun --nproc-per-node 4 -m more_scenarios NAME``."""

import sys

from commlens.scenarios import __main__
from more_scenarios import SCENARIOS

__main__.main(sys.argv[1:], SCENARIOS)
