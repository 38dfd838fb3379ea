"""Quantized checkpoints: what is declared, how weights are stored, and how they are dequantized or kept.

declared   Quantization: what config.json or hf_quant_config.json says; methods, schemes: its readers
form       Form: a storage form as a record; forms: all of them; decode: from bytes to numbers
weight     the tensors of each weight in the files, paired and read dequantized
kept       a weight that stays as it is stored, dequantized when it is used; keep: reads it; shards: over a mesh
encode     other values in the form of a kept weight; written: its tensors in a file
"""
