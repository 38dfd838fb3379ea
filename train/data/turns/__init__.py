"""Texts and images in the turns of a conversation, and checks that a rendered text has all of them."""
