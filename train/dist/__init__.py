"""Collectives as linear maps with gradients, DTensor helpers, and the environment that torchrun sets."""
