"""Measurements of megatron-mtp against what it stands beside; each prints one JSON object as its last line."""
