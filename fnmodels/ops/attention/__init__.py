"""Scaled dot-product attention: one function, `select.attention`, in front of several kernels.

select        the function that blocks call, the choice of kernel="auto", `fnmodels.explain_kernel`
math          written-out softmax, through which every transform works
sdpa          torch's fused attention           flex    FlexAttention
varlen        variable-length flash attention   block_sparse   only the non-empty blocks of a mask, on the CPU
tiled         causal tiles for the CPU: autograd around tiled_kernel (the maths); tiled_op: the same in graphs
"""
