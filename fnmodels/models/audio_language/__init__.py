"""Text models that hear, one file each: an encoder of sound, a text model of another family, and a projector.

The parameters are {"text", "audio", "projector"}; each part is run by itself with its own config, as the file's first
lines show. `fnmodels.towers()` lists them by their `MODEL_TYPES`.
"""
