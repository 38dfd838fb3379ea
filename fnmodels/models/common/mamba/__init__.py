"""The mixers of Mamba: `ssd_mixer`, of Mamba 2 and its hybrids, and `selective_mixer`, of Mamba 1 and its relatives."""

from .selective_mixer import Selective, rank_of, selective, selective_leaves, selective_names
from .ssd_mixer import (
    HYBRID_FIELDS,
    NORMS,
    Mamba,
    hybrid_names,
    mamba,
    mamba_from_hf,
    mamba_leaves,
    mamba_names,
    mamba_to_hf,
    time_step_limit,
)

__all__ = ["Mamba", "mamba", "mamba_from_hf", "mamba_leaves", "mamba_names", "mamba_to_hf", "hybrid_names"]
__all__ += ["HYBRID_FIELDS", "NORMS", "time_step_limit"]
__all__ += ["Selective", "rank_of", "selective", "selective_leaves", "selective_names"]
