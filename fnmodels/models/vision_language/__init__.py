"""Text models that read images, one file each: a tower, a text model of another family, and what is between them.

The parameters are {"text", "vision"} of the parts and the file's own; each part is run by itself with its own config,
as the file's first lines show. `fnmodels.towers()` lists them by their `MODEL_TYPES`. Those of llama4, gemma4 and
qwen3_5 are also a text family's, which reads a config.json without `vision_config`, and `part="text"` of one with it.
"""
