"""What is sent elsewhere: verdicts and metrics."""
