"""What the turns of a conversation say, and whether a rendered text has all of it."""
