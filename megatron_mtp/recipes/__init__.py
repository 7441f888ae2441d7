"""Recipes by name: what others train drafters by, as flags of `train`, a YAML file each.

recipe.py   a recipe, read from its file, and the words of a command line that it stands for
"""
