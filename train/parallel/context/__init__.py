"""Context parallelism: each rank holds some positions of every row; see `api`, and `ring` for one of its methods."""
