"""Paths that make the maths of `ops` fast on CPUs, with the same results up to rounding.

The loop over chunks in `recurrent/` serves CUDA too, with larger steps.
"""
