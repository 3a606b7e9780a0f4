"""From one plan to another: what has to happen, in which order, and whether it fits. No clock, no I/O, no torch."""
