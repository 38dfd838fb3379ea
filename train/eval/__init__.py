"""Evaluation of checkpoints: scores and continuations from token ids.

scoring       log-probabilities of continuations      generate   samples a continuation, without a cache
text_ids      texts as ids: contexts, continuations, windows
over_mesh     the same over processes that share rows and weights
perplexity    loss, perplexity and bits per byte of texts      command    python -m train.eval
text_records  what --data names: files, URLs, functions
harness       a checkpoint as a model of EleutherAI's evaluation harness (extra `eval`)
early_stopping  ends a run whose held-out loss has stopped falling (`--on-step`)
pretrained    the tokenizer and end-of-text id of a checkpoint folder
"""
