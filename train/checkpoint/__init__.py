"""Saved steps of a training run: one folder each, complete or absent.

saved_steps   save, find, verify and load steps of plain tensors
sharded       the same for DTensors, by all processes together (`train.sharded`)
background    `train.Saver`: saves a copy in a thread
rng_state     the states of the global random generators, for losses and data that use them
"""

from train.checkpoint.saved_steps import PROGRESS, STATE, Checkpoint, latest, load, newest, save, set_aside, steps

__all__ = ["PROGRESS", "STATE", "Checkpoint", "latest", "load", "newest", "save", "set_aside", "steps"]
