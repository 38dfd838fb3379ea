"""Adapters for trainers that own the loop, one folder each: `verl`, `tinker`, `trl`."""
