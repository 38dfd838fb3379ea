"""Losses: functions of (params, batch) that return (sum, count) or (sum, count, aux), aux a dict of sums.

next_token      the language-model loss           multi_token   multi-token prediction (MTP) heads
distillation    KL divergence from a teacher      policy        DPO and policy gradients, on log-probabilities
logprobs        log-probability and entropy of each token
pairs           targets of a model of an encoder and a decoder, given their sources
flow_matching   rectified flow with diffusion models
documents       classification, answers and contrastive pairs of packed documents
moe_balance     load-balancing losses of routers, and updates of selection biases
cross_entropy, lm_head, token_chunks, softmax_stats   from hidden states to a loss without all logits in memory
output_loss     `OutputLoss`, a loss of per-token outputs, and `logprob_loss`
values          values of a critic, rewards of pairs
vocab_parallel  embedding, logits and cross entropy over a vocabulary sharded by tensor parallelism
"""
