"""Pure tensor functions, one idea per file. They know nothing of families, configurations or meshes.

`attention/` holds the attention kernels, `moe/` routers, dispatch and experts. `linear` (with `linear_op`, the same in
compiled graphs), `norm`, `rotary`, `mlp`, `embedding`, `qkv` (between residual stream and heads) and `mla` (multi-head
latent attention) are what blocks compute with. `autograd_guard` turns the errors of kernels without second derivatives
into sentences; `torch_internals` is the only file that may use private names of torch.
"""
