"""Pure tensor functions, one idea per file. They know nothing of families, configurations or meshes.

`attention/` holds the attention kernels, `moe/` routers, dispatch and experts. `torch_internals` is the only file that
may use private names of torch.
"""
