"""Monitors of a run while it trains.

trouble       updates that are skipped, jumps of the loss, a loss that does not decrease
slow_ranks    processes that compute slower than the others
waiting       steps that wait for processors
watch         prints them, and says when the run must end
callback      the user's own function of each step
failures      exceptions in code of the user's own
"""
