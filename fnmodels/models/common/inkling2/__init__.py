"""Inkling 2's parameters and the names of its files."""
