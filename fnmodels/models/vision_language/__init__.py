"""Text models that read images, one file each: a tower, a text model of another family, and what is between them.

The parameters are {"text", "vision"} of the parts and the file's own; each part is run by itself with its own config,
as the file's first lines show. `fnmodels.towers()` lists those that are read by their `MODEL_TYPES`; the others have a
text family that reads their checkpoints as text alone, and are given as `family=` to `params.load_pretrained`.
"""
