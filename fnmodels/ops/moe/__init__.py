"""Mixtures of experts: route tokens, run their experts, combine.

layer         one MoE layer: router, k of E experts, an optional shared expert
router        which experts a token goes to, and with what weights
dispatch      sorts tokens by expert and adds results back (`ops.cpu.dispatch`: where the host may read counts)
experts       gated MLPs stacked as [E, out, in], and the choice of how they run; experts_loop: one after the other
"""
