"""What families are written with: parameter declarations, config.json readers, usual layers and names.

registry      finds the family of a Config or of a Hugging Face model type
spec          `Leaf`, the declaration of one parameter, and the leaves of usual layers
config_json   reads config.json so that no field is overlooked; rope_config: its rotary settings
decoder       usual fields, names on disk and layer kinds of decoders; moe: the same for mixtures of experts
context       `Context`, the one extension point of a block: attention, experts, taps
mtp           parameters and names of multi-token prediction heads
storage       parameters that are slices of fused tensors, or stacks of per-expert tensors, on disk
"""
