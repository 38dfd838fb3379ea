"""Hugging Face checkpoint folders: read, check, convert and write them.

config        config.json to the Config of its family
load          (config, params) from a folder; shard_index: which file holds which tensor; read_leaf: one leaf of it
header_checks what is checked before a tensor is read; value_checks: what is checked by reading
tensor_map    our parameter paths and the names on disk
save          config.json and safetensors, the same bytes every time; manifest: sizes and digests of the files
export        parameters under their Hugging Face names, one tensor at a time
"""
