"""Put causes into words: the summary, the explanation, the evidence and the next step."""
