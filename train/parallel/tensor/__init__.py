"""Tensor parallelism: the ranks of a group share heads, MLP widths and vocabulary of the same tokens.

api             `tensor_parallel`: the sharding rules, and the layer function that runs a family's block on shards
leaf_roles      each parameter's role (column-parallel, row-parallel, replicated), from its logical axes
leaf_wrappers   what `linear` and `rms_norm` do with a column- or row-parallel shard
"""
