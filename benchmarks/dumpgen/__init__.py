"""A generator of realistic dumps: thousands of ranks of a job with one injected fault, in the
format of PyTorch's Flight Recorder.

What makes them realistic: pipeline, data and tensor parallel groups in one program, hosts that run
ahead of their GPUs, rings that have wrapped, clocks that disagree, a watchdog that notices only
every 100 ms, dumps that are missing. What a rank is stuck in is not written down by hand: the
programs of all ranks are executed on simulated streams, with the fault, until nothing moves.

``python -m dumpgen --list`` (in the folder ``benchmarks``) names the faults.
"""

from dumpgen.faults import FAULTS, Fault, Truth
from dumpgen.job import Conditions, Job
from dumpgen.mesh import MESHES, Mesh

__all__ = ["FAULTS", "MESHES", "Conditions", "Fault", "Job", "Mesh", "Truth"]
