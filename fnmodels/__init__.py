"""fnmodels: decoder language models as pure functions of parameters, inputs, masks and rotary tables.

    inputs, masks, freqs_cis = fnmodels.prepare(config, tokens)
    logits = fnmodels.forward(params, inputs, masks, freqs_cis, config=config)

Dimension letters, everywhere:

    B  batch        S  query sequence   K  key sequence   D  model width
    N  query heads  G  key/value heads  H  head width     R  rotary dimensions of a head
    F  MLP width    E  experts          V  vocabulary     L  layers

Conventions. Weights are [out, in]. Every per-token tensor has the batch in dimension 0 and the sequence in dimension 1.
`positions` [B, S] determine rotary tables, `segment_ids` [B, S] (documents from 1, padding 0 or less) determine masks,
and labels enter the loss; a model derives none of them from another. Tensors are positional arguments, static arguments
are keywords.
"""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from fnmodels import _shadowing
from fnmodels.apply import forward, hidden, prepare, run_layers, stack_params
from fnmodels.cache import (
    Cache,
    DecodingStep,
    Slots,
    captured_step,
    compiled_step,
    decode,
    decode_,
    encode,
    init_cache,
    insert,
    insert_,
    prefill,
    prepare_step,
    resize,
    take,
    truncate,
)
from fnmodels.diffusion import denoise, flow_times, latent_rows, prepare_denoising, unpacked_latents
from fnmodels.embedding import DenseLayer, Embedder, embed_documents, embeddings
from fnmodels.errors import (
    CheckpointError,
    ConfigError,
    FormatError,
    IndexFileError,
    MismatchError,
    UnsafePathError,
    UnsupportedError,
)
from fnmodels.inputs.audio import frame_rows, log_mel
from fnmodels.inputs.block_mask import to_block_mask
from fnmodels.inputs.convert import to_cu_seqlens, to_dense
from fnmodels.inputs.documents import Documents, documents, pool
from fnmodels.inputs.images import patch_rows
from fnmodels.inputs.layout import Layout, document_layout, layout
from fnmodels.inputs.load_balance import balance, imbalance
from fnmodels.inputs.mask import Mask, build_mask
from fnmodels.inputs.order import Segments
from fnmodels.inputs.packing import pack, unpack
from fnmodels.inputs.rules import BidirectionalWindow, Causal, Chunk, Everything, Rule, SameSpan, Window
from fnmodels.inputs.segments import (
    positions_from_segments,
    segments,
    segments_from_eos,
    segments_from_lengths,
    segments_from_positions,
    text_order,
)
from fnmodels.inputs.transforms import permute, rows, split
from fnmodels.invariance import explain_invariance
from fnmodels.models.common.registry import (
    diffusion_models,
    encoder_decoders,
    families,
    family_for,
    family_of,
    towers,
)
from fnmodels.models.common.spec import Constant, Leaf, Normal
from fnmodels.models.presets import preset, presets
from fnmodels.module import as_module
from fnmodels.ops.attention.select import explain_kernel
from fnmodels.ops.cpu.linear import explain_products
from fnmodels.options import PerLayer
from fnmodels.pairs import pair_batch, prepare_pair
from fnmodels.per_sample import per_sample_gradients
from fnmodels.taps import tap_names

_shadowing.warn_shadowed(__file__, "params", "train")


def __getattr__(name: str) -> ModuleType:
    """Imports a family module on first use, for `from fnmodels import llama`."""
    for folder in ("decoder", "encoder", "encoder_decoder", "vision", "vision_language", "diffusion"):
        spec = find_spec(f"fnmodels.models.{folder}.{name}")
        if spec is not None and spec.submodule_search_locations is None:  # a file, not the folder "common"
            return import_module(f"fnmodels.models.{folder}.{name}")
    raise AttributeError(f"module 'fnmodels' has no attribute {name!r}")


__all__ = ["forward", "hidden", "prepare", "run_layers", "per_sample_gradients", "explain_kernel", "tap_names"]
__all__ += ["explain_invariance", "explain_products", "as_module", "PerLayer"]
__all__ += ["Cache", "Slots", "init_cache", "prepare_step", "prefill", "decode", "decode_", "encode"]
__all__ += ["DecodingStep", "captured_step", "compiled_step"]
__all__ += ["insert", "insert_", "resize", "take", "truncate"]
__all__ += ["Documents", "documents", "pool"]
__all__ += ["DenseLayer", "Embedder", "embed_documents", "embeddings"]
__all__ += ["prepare_pair", "pair_batch", "stack_params", "encoder_decoders"]
__all__ += ["prepare_denoising", "denoise", "flow_times", "latent_rows", "unpacked_latents", "diffusion_models"]
__all__ += ["patch_rows", "frame_rows", "log_mel"]
__all__ += ["pack", "unpack", "permute", "rows", "split"]
__all__ += ["CheckpointError", "ConfigError", "FormatError", "IndexFileError"]
__all__ += ["MismatchError", "UnsafePathError", "UnsupportedError"]
__all__ += ["Mask", "build_mask", "Segments"]
__all__ += ["Rule", "BidirectionalWindow", "Causal", "Chunk", "Everything", "SameSpan", "Window"]
__all__ += ["to_block_mask", "to_cu_seqlens", "to_dense", "Layout", "document_layout", "layout", "balance", "imbalance"]
__all__ += ["segments", "segments_from_eos", "segments_from_lengths", "segments_from_positions"]
__all__ += ["positions_from_segments", "text_order"]
__all__ += ["families", "towers", "family_for", "family_of", "preset", "presets", "Constant", "Leaf", "Normal"]
