"""Losses: functions of (params, batch) that return a sum and a count, and optionally sums beside them (aux).

next_token      the language-model loss           multi_token   multi-token prediction (MTP) heads
distillation    a teacher's distributions         policy        DPO and policy gradients, on log-probabilities
logprobs        log-probability and entropy of each token
moe_balance     load-balancing losses of routers, and selection biases
cross_entropy, lm_head, token_chunks, softmax_stats   from hidden states to a loss without all logits in memory
model_loss      `ModelLoss`, the one form of a loss, and `RunOptions`: how a run calls the model inside of it
vocab_parallel  embedding, logits and cross entropy over a vocabulary sharded by tensor parallelism
"""
