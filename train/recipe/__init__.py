"""From nothing to a chat by one file: `python -m train.recipe RECIPE.toml` runs the commands of its stages in turn.

stages      the recipe file and the commands of its stages
run         runs what is not done yet
report      one HTML file with curves, numbers and samples; charts: its pictures
"""
