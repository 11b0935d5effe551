"""Compare the tensors that ranks must have alike, while the job runs."""
