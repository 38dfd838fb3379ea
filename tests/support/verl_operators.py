"""Operators that torchvision names when it is imported, where its own are built for another torch than the one here.

A registry may have torchvision for CUDA alone, whose library does not load beside a torch for CPUs. Processors of
images use the part of it that is written in Python, which needs these names to be there. VERL_USE_EXTERNAL_MODULES
names this module first.
"""

from importlib.util import find_spec
from pathlib import Path

import torch

if (found := find_spec("torchvision")) is not None and found.origin is not None:
    try:
        for library in Path(found.origin).parent.glob("_C*.so"):
            torch.ops.load_library(library)
    except OSError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float threshold) -> Tensor")
