"""Messages to other systems: verdicts and metrics."""
