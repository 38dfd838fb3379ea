"""Reinforcement learning from rewards: `python -m train.rl`.

prompts        conversations to answer, and the checkers of the answers
loop           GRPO of one turn: draws, judges and updates
environment    the other side of a conversation of many turns
tools, tasks   an environment of Python functions, and two tasks with tools
turns          the tokens between two turns of the model
conversation   a conversation in token ids, what is left of it, and batches of those
rollouts       conversations over continuous batching
ahead          rollouts beside training, with weights of bounded age; helpers: threads
many_turns     GRPO of many turns
command, flags the command line
"""
