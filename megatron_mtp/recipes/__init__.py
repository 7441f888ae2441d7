"""Recipes by name: published training settings as flags of `train`, a YAML file each.

recipe.py   a recipe, read from its file, and the command-line words that it adds
"""
