"""Drafting: several tokens per forward of the trunk, with the modules as trained."""
