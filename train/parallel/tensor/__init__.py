"""Tensor parallelism: the ranks of a group share heads, MLP widths and vocabulary of the same tokens; see `api`."""
