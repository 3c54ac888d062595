"""Draws what `benchmarks.quality` has measured: KL over budget, KL over summary bytes, and coverage by layer and head."""
