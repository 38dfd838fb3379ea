"""Training data: from files to the batch of a step, as a function of (seed, step) without loader state.

sources         parses --data and finds the sources; corpus: text files; records: JSON lines, Parquet, datasets;
                token_shards: .npy files of token ids
chat            conversations by a chat template, with the assistant's tokens as targets
tokenizer       trains byte-level BPE; encoder, encoder_pool: tokenize in several processes; cache: keeps the result
tokenized       all sources as token ids, split into training and held-out documents
rows            rows of one length; sampling: which row comes when; mixture: rows of weighted sources, as a batch
"""

from train.data.sources import of_dataset, read_sources

__all__ = ["of_dataset", "read_sources"]
