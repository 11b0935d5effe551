"""``commlens demo`` for all scenarios: ``python -m more_scenarios.demo NAME FOLDER``."""

import sys
from pathlib import Path

from commlens.commands import demo
from more_scenarios import find

scenario, folder = find(sys.argv[1]), Path(sys.argv[2])
demo.introduce(scenario, 4, 3.0)
demo.run_job(scenario, 4, 3.0, folder)
sys.exit(demo.conclude(scenario, 4, folder, given=True))
