"""The inputs of a model: order-dependent tensors that `fnmodels.prepare` builds once per batch; no model code.

segments      segment ids and positions: from lengths, end tokens, position resets
packing       documents into rows of one length, with labels (IGNORE = -100)
mask, rules   attention masks as data: positions and segment ids, and the static predicates over them
layout        host-side facts of one batch that fast kernels need: document boundaries, plain causal rows
convert       a mask as a dense tensor or as cumulative lengths; block_mask: as FlexAttention's BlockMask
noise         keys of noise, one per token, from which dropout hashes its masks
order         segments as what order-dependent layers read, in place of a mask
values        reads tensor values on the host, under transforms too
transforms    one rule for the batch and sequence dimensions: rows (for vmap), permute, split
load_balance  the sequence order that gives context-parallel ranks equal work
"""

from .audio import chunk_rows, frame_rows, log_mel
from .block_mask import to_block_mask
from .convert import to_cu_seqlens, to_dense
from .images import patch_rows
from .layout import Layout, document_layout
from .load_balance import balance, imbalance
from .mask import Mask, build_mask
from .noise import noise_keys
from .order import Segments
from .rules import BidirectionalWindow, Causal, Chunk, Everything, Rule, SameSpan, Window
from .segments import segments_from_eos, segments_from_positions, text_order
from .waves import sample_rows, unit_variance, wave_rows

__all__ = [
    "BidirectionalWindow",
    "Causal",
    "Chunk",
    "Everything",
    "Layout",
    "Mask",
    "Rule",
    "SameSpan",
    "Segments",
    "Window",
    "balance",
    "build_mask",
    "chunk_rows",
    "document_layout",
    "frame_rows",
    "imbalance",
    "log_mel",
    "noise_keys",
    "patch_rows",
    "sample_rows",
    "segments_from_eos",
    "segments_from_positions",
    "text_order",
    "to_block_mask",
    "to_cu_seqlens",
    "to_dense",
    "unit_variance",
    "wave_rows",
]
