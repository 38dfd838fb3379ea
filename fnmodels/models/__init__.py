"""Model families, one file each: a frozen Config, the parameter `spec`, the `block` and the maths around it.

Families import `common`, `fnmodels.ops` and `fnmodels.inputs`, never each other. A new file in this folder is found by
its `MODEL_TYPES`, without a registry. `presets.py` holds published sizes as data. docs/adding-a-family.md explains how
to write a family.
"""
