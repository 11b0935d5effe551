"""Plain typed data: records, traces, verdicts, and the semantics of ops. No torch, no I/O."""
