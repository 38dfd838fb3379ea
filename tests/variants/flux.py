"""A tiny configuration of Flux and the published totals. No two sizes are equal."""

from typing import Any

TINY: dict[str, Any] = {
    "_class_name": "FluxTransformer2DModel",
    "in_channels": 12,
    "out_channels": 8,
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 14,
    "num_attention_heads": 2,
    "joint_attention_dim": 10,
    "pooled_projection_dim": 9,
    "guidance_embeds": True,
    "axes_dims_rope": [2, 4, 8],
    "patch_size": 1,
}

# Parameter counts that diffusers' models of these configs have.
TOTALS: dict[str, int] = {"flux.1-dev": 11_901_408_320, "flux.1-schnell": 11_891_178_560}
