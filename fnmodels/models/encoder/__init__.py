"""Encoder families, one file each; see `fnmodels.models`. `fnmodels.families()` lists them by `MODEL_TYPES`."""
