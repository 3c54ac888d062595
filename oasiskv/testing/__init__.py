"""Helpers for tests and demonstrations: real models and real texts that need no network once installed."""
