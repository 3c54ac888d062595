"""Adapters: OasisKV inside other people's engines."""
