"""From the ranks' records to a verdict. No torch.

How it works, in the order of the modules:

1. ``api`` discovers the dump files of the given paths; ``columns`` reduces another tool's dump to
columns. 2. ``select_job`` and ``select_dumps`` select one job, and one log or dump of each of its
ranks. 3. ``index`` and ``dump_index`` index the records of each rank by channel (process group and
device type) and sequence number. 4. ``alignment`` compares, number by number, the arguments of all
ranks of a channel, and finds the mismatches. Where one rank
   skipped a collective, ``out_of_step`` and ``routine`` determine which one.
5. ``graph.build`` starts at each blocked thread and adds an edge to each rank or thread that
it waits for. 6. The sinks of this graph (an absent or dead rank, a mismatch, a collective that all
ranks have reached) and its cycles are the
   root causes. The ranks with a path to one are its victims.
7. ``causes`` tells each of them as data and separates it from its consequences; ``activity`` and
``process_exit`` explain the culprit's state. 8. ``words`` makes a finding of each, and ``examine``
adds the missing evidence: the verdict.
"""
