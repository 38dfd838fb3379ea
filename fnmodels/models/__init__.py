"""Model families, one file each: a frozen Config, the parameter `spec`, the `block` and the maths around it.

decoder          models of text that generate it      encoder          models of text that see both sides
encoder_decoder  pairs of texts, speech and text      vision           towers, and pairs of an image and a text
vision_language  texts with images                    audio            encoders of raw waves
audio_language   texts with sound                     diffusion        latents

Families import `common`, `fnmodels.ops` and `fnmodels.inputs`, never each other. A new file in one of these folders is
found by its `MODEL_TYPES`, without a registry. `presets.py` holds published sizes as data. docs/adding-a-family.md
explains how to write a family.
"""
