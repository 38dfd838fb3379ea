"""Losses: functions of (params, batch) that return (sum, count) or (sum, count, aux), aux a dict of sums.

next_token      the language-model loss           multi_token   multi-token prediction (MTP) heads
distillation    KL divergence from a teacher      policy        DPO and policy gradients, on log-probabilities
logprobs        log-probability and entropy of each token
pairs           targets of a model of an encoder and a decoder, given their sources
ctc             what clips of sound say, and greedy decoding of it
flow_matching   rectified flow with diffusion models
documents       classification, answers and contrastive pairs of packed documents
indexers        the indexers that choose the keys of attention
moe_balance     load-balancing losses of routers, and updates of selection biases
cross_entropy, lm_head, token_chunks, softmax_stats   from hidden states to a loss without all logits in memory
output_loss     `OutputLoss`, a loss of per-token outputs, and `logprob_loss`
values          values of a critic, rewards of pairs
vocab_parallel  embedding, logits and cross entropy over a vocabulary sharded by tensor parallelism
"""

from .ctc import ctc_greedy, ctc_loss
from .distillation import distillation_loss, token_divergence
from .documents import answer_loss, token_classification_loss
from .flow_matching import flow_noise
from .image_text import image_text_batch
from .indexers.loss import indexer_loss, with_indexers
from .lm_head import head_loss
from .logprobs import document_sums, head_logprobs, routed_logprobs
from .moe_balance import balance_loss, router_z_loss, update_bias
from .multi_token import look_ahead
from .output_loss import OutputLoss
from .pairs import pair_loss
from .policy import group_advantages
from .values import advantages, reward_loss, token_values, value_loss

__all__ = [
    "OutputLoss",
    "advantages",
    "answer_loss",
    "balance_loss",
    "ctc_greedy",
    "ctc_loss",
    "distillation_loss",
    "document_sums",
    "flow_noise",
    "group_advantages",
    "head_logprobs",
    "head_loss",
    "image_text_batch",
    "indexer_loss",
    "look_ahead",
    "pair_loss",
    "reward_loss",
    "routed_logprobs",
    "router_z_loss",
    "token_classification_loss",
    "token_divergence",
    "token_values",
    "update_bias",
    "value_loss",
    "with_indexers",
]
