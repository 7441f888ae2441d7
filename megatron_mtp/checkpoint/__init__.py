"""Checkpoints: what is in them, and how they come in and out."""
