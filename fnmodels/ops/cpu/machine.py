"""Identity of this machine: the key of the files with measured rates of products and with compiled steps.

Row: train_step.
"""

import os
import platform
from contextlib import suppress
from pathlib import Path

import torch

_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_DEBUG_CPU_TYPE")


def machine() -> dict[str, str]:
    """The processor, the release of torch, and variables that limit its libraries."""
    found = {"processor": platform.processor() or platform.machine(), "torch": torch.__version__}
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
        pairs = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        wanted = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags")
        found |= {name: pairs[name] for name in wanted if name in pairs}
    return found | {name: os.environ[name] for name in _VARIABLES if name in os.environ}
