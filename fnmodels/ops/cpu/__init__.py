"""Paths that make the maths of `ops` fast on CPUs, with the same results up to rounding.

Each file names the row of benchmarks/dev/results/ops_cpu.md that it earns; what earns less than 10% of a training step
or a decoding step on every kind of CPU is not kept. The loop over chunks in `recurrent/` serves CUDA too, with larger
steps.
"""
