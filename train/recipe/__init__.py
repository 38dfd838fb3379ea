"""From nothing to a chat by one file: `python -m train.recipe RECIPE.toml` runs the commands of its stages in turn.

stages      the recipe file and the commands of its stages
checks      what a stage would refuse, before the first one runs
run         runs what is not done yet
report      one HTML file with curves, numbers and samples; charts: its pictures
"""
