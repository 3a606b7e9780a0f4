"""Measurements, each against a named peer or limit: `python -m benchmarks NAME [--json FILE]`."""
