"""A model for TRL's trainers; nothing here imports trl, and nothing imports this."""

from .causal_lm import CausalLM

__all__ = ["CausalLM"]
