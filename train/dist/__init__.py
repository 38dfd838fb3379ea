"""Communication between processes, and nothing above it.

collectives   linear maps over processes with their transposes as gradients: the only file that sends tensors
dtensor       DTensors as local shards and placements
region        entry to and exit from a tensor-parallel region
torchrun      the environment variables of torchrun
"""
