"""Bounds for what oneDNN and torch keep of each shape of a product: generated code and scratch memory."""

import os

# Both keep 1,024 shapes by default, about 0.3 MB each. A step has fewer than 100 shapes that the next step has too;
# those that depend on the batch (labelled tokens, tokens of an expert) do not come back.
CAPACITY = 128
VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def bound_product_caches() -> None:
    """Bounds both caches of this process and of those it starts, unless the environment sets them already.

    They are read at the first product. Only a main program calls this: a library leaves the environment alone.
    """
    for name in VARIABLES:
        os.environ.setdefault(name, str(CAPACITY))
