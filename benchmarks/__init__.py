"""Measurements of megatron-mtp against other ways to do the same; each prints one JSON object as its last line."""
