"""A scenario whose fault and process group outlast the default stall timeout:
``_patient_scenario.py NAME``.
"""

import sys
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "integration"))

from more_scenarios import SCENARIOS

from commlens.scenarios import __main__, lab

lab.STALL_S = 300.0
lab.GROUP_TIMEOUT = timedelta(minutes=10)
__main__.main(sys.argv[1:], SCENARIOS)
