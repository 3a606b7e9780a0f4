"""Other systems, in the frozen set-ups that benchmarks compare with."""
