"""Reinforcement learning from answers that a checker judges: `python -m train.rl`.

prompts     conversations to answer, and the checkers of the answers
loop        draws, judges and updates (GRPO)
command     the command line
"""
