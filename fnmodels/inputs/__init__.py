"""The inputs of a model: order-dependent tensors that `fnmodels.prepare` builds once per batch; no model code.

segments      segment ids and positions: from lengths, end tokens, position resets
packing       documents into rows of one length, with labels (IGNORE = -100)
mask, rules   attention masks as data: positions and segment ids, and the static predicates over them
layout        host-side facts of one batch that fast kernels need: document boundaries, plain causal rows
convert       a mask as a dense tensor or as cumulative lengths; block_mask: as FlexAttention's BlockMask
order         segments as what order-dependent layers read, in place of a mask
values        reads tensor values on the host, under transforms too
transforms    one rule for the batch and sequence dimensions: rows (for vmap), permute, split
load_balance  the sequence order that gives context-parallel ranks equal work
"""
