"""Lookahead predictors: one idea per file, registered under `oasiskv.predictors`."""
