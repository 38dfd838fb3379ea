"""Settings of malloc, oneDNN and torch for a main program: to use freed buffers again, and to forget shapes."""

import ctypes
import os
import sys

# Both keep 1,024 shapes by default, about 0.3 MB each. A step has fewer than 96 shapes that the next step has too;
# those that depend on the batch (labelled tokens, tokens of an expert) do not come back. A model of 0.4M parameters
# grows by 85 MB from its first step, with 128 shapes by 113 MB, at the same speed.
CAPACITY = 96
VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
KEPT = 2**31 - 1  # bytes; mallopt takes an int
MALLOC = {"MALLOC_MMAP_THRESHOLD_": -3, "MALLOC_TRIM_THRESHOLD_": -1}  # variable: mallopt's number of the same setting


def bound_product_caches() -> None:
    """Bounds both caches of this process and of those it starts, unless the environment sets them already.

    They are read at the first product. Only a main program calls this: a library leaves the environment alone.
    """
    for name in VARIABLES:
        os.environ.setdefault(name, str(CAPACITY))


def keep_freed_memory() -> None:
    """Makes this process and those it starts keep up to 2 GiB of freed memory, for faster steps on CPUs.

    glibc returns each buffer above 32 MiB to the system, which clears every page of the next one: 9% of a step of 4,096
    tokens and 15% of one of 8,192 (26M parameters, fp32). The peak of memory rises by up to 6%. `python -m train` calls
    it; a script with a training loop of its own may, before its first tensors. Without glibc, or where the environment
    sets glibc's variables, it does nothing.
    """
    if sys.platform != "linux" or MALLOC.keys() & os.environ.keys():
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library than glibc
        return
    for name, number in MALLOC.items():
        mallopt(number, KEPT)
        os.environ[name] = str(KEPT)
