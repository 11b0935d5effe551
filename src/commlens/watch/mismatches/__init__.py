"""Collectives that differ between ranks, compared while the job runs."""
