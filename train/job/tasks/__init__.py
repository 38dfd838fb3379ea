"""Tasks of runs: the data, loss, evaluation and model card of each, for the one loop of `train.job.run`.

language_model    next-token prediction on text; initial_model: new, loaded, with adapters; new_model: its Config
documents         encoders on lines of JSON, each an `Encoder`: pairs, labels, masked, captions
flow              flow matching of images
"""
