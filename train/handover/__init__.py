"""Weights on their way to a rollout: what is handed over, and the changes since."""
