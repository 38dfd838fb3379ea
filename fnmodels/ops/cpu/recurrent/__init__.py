"""Recurrences outside of autograd: the loop over chunks, and steps with their gradients by hand."""
