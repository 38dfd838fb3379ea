"""Moves a tree's tensors to host memory and back, in place: every reference to them stays valid.

restore = offload(state)       # the device memory is free
restore()                      # the same tensors hold the same bits again
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.tree import Tree
from train.comm.dtensor import local_tree


def offload(values: Tree) -> Callable[[], None]:
    """Copies all tensors (of DTensors the local shards) to host memory and frees their storage; returns the way back.

    Until `restore` runs, nothing may read the tensors. On a CUDA device the copies are in pinned memory. ValueError,
    before anything is freed, for a tensor that does not own its storage, such as a view of a mapped file.
    """
    held: dict[str, Tensor] = {path: leaf for path, leaf in tree.flatten(local_tree(values)).items() if leaf.numel()}
    storages: dict[int, str] = {}
    for path, leaf in held.items():
        storage = leaf.untyped_storage()
        other = storages.setdefault(storage.data_ptr(), path)
        if other != path or storage.nbytes() != leaf.nbytes or not storage.resizable():
            raise ValueError(
                f"{path} does not own its memory (it is a view, or maps a file), so that freeing it would free more: "
                "give the engine copies (copy=True)."
            )
    copies = [(leaf, _on_host(leaf), leaf.untyped_storage().nbytes()) for leaf in held.values()]
    for device in {leaf.device for leaf in held.values() if leaf.is_cuda}:
        torch.cuda.synchronize(device)  # the copies run asynchronously
    for leaf, _, _ in copies:
        leaf.untyped_storage().resize_(0)

    def restore() -> None:
        while copies:
            leaf, copy, size = copies.pop()
            leaf.untyped_storage().resize_(size)
            with torch.no_grad():
                leaf.copy_(copy)

    return restore


def _on_host(leaf: Tensor) -> Tensor:
    copy = torch.empty_like(leaf, device="cpu", pin_memory=leaf.is_cuda)
    return copy.copy_(leaf.detach(), non_blocking=True)
