"""Common parts of models made of several families: two towers, or a tower and a text model."""
