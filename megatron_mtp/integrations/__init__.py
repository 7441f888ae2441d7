"""Doors for programs of others: their own scripts keep running, with the depths of this package."""
