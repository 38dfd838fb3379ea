"""Layers with a state that flows along the sequence, as functions (tensors, segment ids, state) -> (y, state).

conv            short causal depthwise convolution; conv_reads: which tokens it reads
delta_rule      gated delta rule: Gated DeltaNet (a decay per head), Kimi Delta Attention (a decay per key channel)
delta_per_head  a chunk of it for a decay per head, and its gradient, by hand
ssd             state space duality: Mamba 2; ssd_chunk: a chunk of it, and its gradient, by hand
scan            the loop over chunks with its gradient; chunks: the same outside of autograd; scan_op: in graphs
decay           decays of a chunk's tokens
two_keys        RWKV-7: a state that is read along one key and written along two others
token_shift     the token before each one
gated_norm      RMSNorm with a gate

A state belongs to one document: every token reads only what earlier tokens of its own document wrote. Documents are
runs of one segment id above 0; padding (0 or less) is skipped wherever it stands, and neither reads nor writes.
A state that is passed in goes on if the first token's segment id is that of the last token before it.
"""
