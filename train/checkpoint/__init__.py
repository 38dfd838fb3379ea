"""Saved steps of a training run: one folder each, complete or absent; for DTensors see `sharded`."""

from train.checkpoint.rng_state import random_state, set_random_state
from train.checkpoint.saved_steps import PROGRESS, STATE, Checkpoint, latest, load, newest, save, set_aside, steps

__all__ = ["PROGRESS", "STATE", "Checkpoint", "latest", "load", "newest", "save", "set_aside", "steps"]
__all__ += ["random_state", "set_random_state"]
