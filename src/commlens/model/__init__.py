"""Plain data, typed: what ranks recorded, and the verdict. No torch, no I/O."""
