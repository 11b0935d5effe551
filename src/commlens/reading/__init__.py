"""What people do with a trace: read, filter, sum up, save, compare, hold a test to it. No torch."""
