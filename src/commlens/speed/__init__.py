"""How fast the steps of a job are, and which ranks make the others wait."""
