"""Contents of a benchmark's last line."""

from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


KEYS = {"benchmark", "command", "hardware", "versions", "results", "goals", "tables"}
