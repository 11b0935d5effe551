"""From the ranks' records to a verdict. No torch.

The rooms, in the order in which a diagnosis passes through them:

1. ``api`` discovers the files in the given paths and reads them; ``examine`` runs the rest.
2. ``select`` selects one job, and one log or dump of each of its ranks.
3. ``index`` indexes the records of each rank by channel (process group and device type) and
   sequence number, and finds the op in which each thread is blocked.
4. ``align`` compares, number by number, the collectives of all ranks of a channel, and finds the
   mismatches. Where one rank skipped a collective, it determines which one.
5. ``graph`` starts at each blocked thread and adds an edge to each rank or thread that it waits
   for. Its sinks (an absent or dead rank, a mismatch, a collective that all ranks have reached)
   and its cycles are the root causes; the ranks with a path to one are its victims.
6. ``causes`` makes data of each of them, decides whom to blame, and separates causes from
   consequences.
7. ``words`` makes a finding of each cause, and ``action`` decides what to do with the job.

``fold`` spares a large job the examination of ranks in the same state, ``views`` shows what is in
the records apart from faults, and ``live`` and ``standstill`` look at a running job.
"""
