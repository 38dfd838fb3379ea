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
from fnmodels import diffusion as diffusion
from fnmodels.apply import forward, hidden, prepare, run_layers, stack_params
from fnmodels.cache import (
    Cache,
    Slots,
    compiled_step,
    decode,
    decode_,
    init_cache,
    insert,
    prefill,
    prepare_step,
    resize,
    take,
    truncate,
)
from fnmodels.embedding import Embedder, embed_documents, embeddings
from fnmodels.inputs.documents import Documents, TokenVectors, documents, max_sim, pool, token_vectors
from fnmodels.inputs.layout import layout
from fnmodels.inputs.packing import pack, unpack
from fnmodels.inputs.segments import positions_from_segments, segments, segments_from_lengths
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
from fnmodels.ops.remat import remat
from fnmodels.options import PerLayer
from fnmodels.pairs import pair_batch, prepare_pair
from fnmodels.per_sample import per_sample_gradients
from fnmodels.taps import tap_names
from fnmodels.text_embedding import embed_texts

_shadowing.warn_shadowed(__file__, "params", "train")


def __getattr__(name: str) -> ModuleType:
    """Imports a family module on first use, for `from fnmodels import llama`."""
    texts, others = ("decoder", "encoder", "encoder_decoder"), ("vision", "vision_language", "audio", "audio_language")
    for folder in (*texts, *others, "diffusion"):
        spec = find_spec(f"fnmodels.models.{folder}.{name}")
        if spec is not None and spec.submodule_search_locations is None:  # a file, not the folder "common"
            return import_module(f"fnmodels.models.{folder}.{name}")
    raise AttributeError(f"module 'fnmodels' has no attribute {name!r}")


__version__ = "0.1.0"

__all__ = ["forward", "hidden", "prepare", "run_layers", "per_sample_gradients", "explain_kernel", "tap_names"]
__all__ += ["explain_invariance", "explain_products", "as_module", "PerLayer", "remat"]
__all__ += ["Cache", "Slots", "init_cache", "prepare_step", "prefill", "decode", "decode_"]
__all__ += ["compiled_step"]
__all__ += ["insert", "resize", "take", "truncate"]
__all__ += ["Documents", "TokenVectors", "documents", "max_sim", "pool", "token_vectors"]
__all__ += ["Embedder", "embed_documents", "embed_texts", "embeddings"]
__all__ += ["prepare_pair", "pair_batch", "stack_params", "encoder_decoders"]
__all__ += ["diffusion_models"]
__all__ += ["pack", "unpack", "permute", "rows", "split"]
__all__ += ["layout"]
__all__ += ["segments", "segments_from_lengths"]
__all__ += ["positions_from_segments"]
__all__ += ["families", "towers", "family_for", "family_of", "preset", "presets", "Constant", "Leaf", "Normal"]
