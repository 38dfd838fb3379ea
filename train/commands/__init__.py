"""Commands beside the main job: `python -m train.sample`, `.tasks`, `.plot` and `.compare`, one file each.

The modules train/sample.py, tasks.py, plot.py and compare.py only call them, so that the commands keep short names.
"""
