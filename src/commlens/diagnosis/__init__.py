"""From dumps and black boxes to a verdict. No torch."""
