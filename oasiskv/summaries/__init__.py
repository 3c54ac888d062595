"""Key summaries: one idea per file, registered under `oasiskv.key_summaries`."""
