"""Trees of parameters to and from pytrees of `jax.Array`, by DLPack, which shares memory in place of copying it.

jax is optional, and imported by the call.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor
from torch.utils.dlpack import from_dlpack

from fnmodels import tree
from fnmodels.tree import Tree


def to_jax(params: Tree) -> Any:
    """The tree with jax arrays in place of tensors: nested dicts and lists, which flax and optax take.

    Args:
        params: A tree of dense tensors. Those that require a gradient are detached, others than contiguous ones copied.

    Returns:
        A pytree of the same structure and dtypes. Its arrays share the tensors' memory where jax reads it: write into
        neither afterwards. (`train.init_state` copies, so a step in place is safe.)

    Raises:
        ImportError: jax is not installed.
        ValueError: A leaf that jax would hold in another dtype: 64 bits need jax.config.update("jax_enable_x64", True).
    """
    jax = _jax()

    def moved(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            raise ValueError(f"Leaf {path!r} is a {type(leaf).__name__}; jax arrays are made of dense tensors.")
        array = jax.dlpack.from_dlpack(leaf.detach().contiguous())
        dtype = str(leaf.dtype).removeprefix("torch.")
        if str(array.dtype) != dtype:
            raise ValueError(
                f"Leaf {path!r} is {dtype} and jax makes it {array.dtype}: call "
                'jax.config.update("jax_enable_x64", True) before.'
            )
        return array

    paths = iter(tree.flatten(params))
    return tree.map(lambda leaf: moved(next(paths), leaf), params)


def from_jax(pytree: Any) -> Tree:
    """A tree of tensors from a pytree of jax arrays: nested dicts and lists by the names and indices of its paths.

    Args:
        pytree: Any registered pytree: dicts, lists and tuples, flax's dicts, modules of equinox, dataclasses. Entries
            are by the key, index or attribute with which jax names them.

    Returns:
        The tree. Its tensors share the arrays' memory, and jax takes arrays as constant: copy them to write into them.
        An entry without arrays, such as None, is left out of a dict, and keeps its place in a list as {}.

    Raises:
        ImportError: jax is not installed.
        ValueError: A leaf is no jax array (filter an equinox module by `eqx.filter(module, eqx.is_array)`), or a PRNG
            key; the pytree is one array; or a name has a dot, which paths cannot have.
    """
    jax = _jax()
    flat: dict[str, Tree] = {}
    leaves, _ = jax.tree_util.tree_flatten_with_path(pytree, is_leaf=lambda node: not jax.tree_util.tree_leaves(node))
    for keys, leaf in leaves:
        names = [str(_name_of(key)) for key in keys]
        if any("." in name for name in names):
            raise ValueError(f"The entry {names} of the pytree has a dot in a name, which separates names in paths.")
        if jax.tree_util.tree_leaves(leaf):
            flat[".".join(names)] = _tensor(jax, ".".join(names), leaf)
        elif keys and isinstance(keys[-1], jax.tree_util.SequenceKey):
            flat[".".join(names)] = {}
    return tree.unflatten(flat)


def _tensor(jax: Any, path: str, leaf: Any) -> Tensor:
    if not isinstance(leaf, jax.Array):
        raise ValueError(f"Leaf {path!r} is a {type(leaf).__name__}; tensors are made of jax arrays.")
    if not path:
        raise ValueError("The pytree is one array, which has no name: pass a dict, such as {'weight': array}.")
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise ValueError(
            f"Leaf {path!r} is a PRNG key, and keys are not parameters: leave it out, in flax by "
            "nnx.state(model, nnx.Param)."
        )
    tensor: Tensor = from_dlpack(leaf)
    return tensor


def _name_of(key: Any) -> Any:
    """The name in jax's DictKey, FlattenedIndexKey, GetAttrKey or SequenceKey."""
    return next(getattr(key, field) for field in ("key", "name", "idx") if hasattr(key, field))


def _jax() -> Any:
    try:
        return importlib.import_module("jax")
    except ImportError as error:
        raise ImportError("Trees of jax arrays need jax, which is not installed: pip install jax.") from error
