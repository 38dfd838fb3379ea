"""GGUF files, the form of llama.cpp: metadata as a config.json, tensors under Hugging Face names, the tokenizer.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""
