"""Residual streams of several rows."""
