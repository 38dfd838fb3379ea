"""The one exception that the commands turn into a sentence and exit code 2."""


class UserError(ValueError):
    """Something the caller can put right: the message is one sentence that names the value and what would be right."""
