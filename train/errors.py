"""The exception of everything that a user can put right, which the commands turn into a sentence and exit code 2."""

from params.command_line import UserError

__all__ = ["UserError"]
