"""Batch-invariant forms: the bits of a token's result depend on the tokens of its document alone."""
