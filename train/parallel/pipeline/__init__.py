"""Pipeline parallelism: a stage is a slice of the params tree and a pure function, run by torch's own schedules.

Entry points are in `gradients`, and inside a mesh in `stages`. This file imports nothing, so that importing one module
of the folder loads no other.
"""
