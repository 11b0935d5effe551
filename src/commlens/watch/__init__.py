"""Outside, on the node: read black boxes and look at processes; notice stall, death and mismatch."""
