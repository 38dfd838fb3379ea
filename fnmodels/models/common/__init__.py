"""Building blocks of family modules: parameter declarations, config.json readers, default layers and tensor names.

family        the protocols of families and Configs, `Traits`, `LayerKind`
registry      finds the family of a Config or of a Hugging Face model type
spec          `Leaf`, the declaration of one parameter, and the leaves of usual layers
config_json   `Fields`, which reads config.json and refuses unknown fields; rope_config: its rotary settings
decoder       default fields, masks, tensor names and layer kinds of decoders; moe: the same for mixtures of experts
context       `Context`, the extension point of a block: attention, experts, taps
mamba         the mixer of Mamba 2 and of hybrids: its leaves, names, fields and maths
mtp           parameters and names of multi-token prediction heads
storage       parameters that are slices of fused tensors, or stacks of per-expert tensors, on disk
"""
