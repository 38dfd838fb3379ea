"""The factors that a GGUF file divides rotary frequencies by, as a rule of config.json."""

import math

import torch
from torch import Tensor

from fnmodels.models.common.config_json import ConfigJson

ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}


def llama3_scaling(factors: Tensor, theta: float, head_dim: int) -> ConfigJson | None:
    """The rope_scaling whose factors these are, as published with Llama 3.1 to 3.3; None if there is none."""
    factor, low, high, original = float(factors.max()), 1.0, 4.0, 8192
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    smooth = ((original / (2 * math.pi) * frequencies - low) / (high - low)).clamp(0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if factors.shape != expected.shape or not torch.allclose(factors.double(), expected, rtol=1e-4):
        return None
    bounds = {"low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": original}
    return {"rope_type": "llama3", "factor": factor, **bounds}
