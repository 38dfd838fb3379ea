"""What models of several parts share, each part a family of its own: two towers, or a tower and a text model."""
