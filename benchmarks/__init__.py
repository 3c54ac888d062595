"""Programs that measure what the library promises: `python -m benchmarks.NAME [--json]`."""
