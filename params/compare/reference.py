"""The same checkpoint in transformers: the model, its list of layers, and its tensors as they are published."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fnmodels import family_of
from fnmodels.errors import UnsupportedError
from fnmodels.models.common.family import DecoderConfig, traits_of
from fnmodels.models.common.registry import to_hf
from params.checkpoint.tensor_map import by_name, published_names, stored_leaves

_CLASSES = {"mistral4": "Mistral4ForCausalLM"}  # of model types that AutoModelForCausalLM of 5.23 does not know


def transformers_if_installed() -> Any:
    """The transformers package, or None where it is not installed. Only this function imports it."""
    try:
        return importlib.import_module("transformers")  # by name, so that type checkers do not follow the import
    except ImportError:
        return None


def load_reference(transformers: Any, folder: Path, config: DecoderConfig) -> Any:
    """The folder's model in transformers: fp32, with the eager implementations of attention and experts."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    name = _CLASSES.get(config.model_type, "AutoModelForCausalLM")
    if not traits_of(family_of(config)).causal:
        (name,) = to_hf(config)["architectures"]
    try:
        model = getattr(transformers, name).from_pretrained(
            folder,
            dtype=torch.float32,
            # its eager Falcon adds linear biases twice, in the mask and to the scores
            attn_implementation="sdpa" if getattr(config, "alibi", False) else "eager",
            experts_implementation="eager",
            local_files_only=True,
            use_safetensors=True,  # and no pickles
            trust_remote_code=False,
        )
    except Exception as error:  # transformers raises errors of many types
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UnsupportedError(f"transformers cannot load {folder}: {reason}") from error
    if layers_of(model) is None:
        raise UnsupportedError(f"transformers' {type(model).__name__} has no list of `layers` to compare.")
    return model.eval()


def layers_of(model: Any) -> Any:
    """The reference's list of layers, or None if its modules have unknown names. Of HRM-Text those of both stacks.

    Of Zamba 2 the shared block and the Mamba layer of a layer that has both.
    """
    # Llama 4's text model names a base that only the model with a vision tower has
    base = model.model if model.base_model is model else model.base_model
    base = next((getattr(base, name) for name in ("encoder", "transformer", "decoder") if hasattr(base, name)), base)
    if hasattr(base, "layer"):
        return base.layer
    if hasattr(base, "L_module"):
        return [*base.L_module.layers, *base.H_module.layers]
    if any(hasattr(layer, "shared_transformer") for layer in getattr(base, "layers", ())):
        parts = (
            (getattr(layer, name, None) for name in ("shared_transformer", "mamba_decoder")) for layer in base.layers
        )
        found = (
            [part for part in both if part is not None] or [layer]
            for both, layer in zip(parts, base.layers, strict=True)
        )
        return [part for layer in found for part in layer]
    if hasattr(base, "albert_layer_groups"):
        return [group.albert_layers[0] for group in base.albert_layer_groups]
    return next((getattr(base, name) for name in ("layers", "h", "blocks") if hasattr(base, name)), None)


def on_disk(model: Any) -> dict[str, Tensor]:
    """The reference's tensors by their names in files, not those in memory. A tied head is listed once."""
    loading = importlib.import_module("transformers.core_model_loading")
    all_named = dict(model.named_parameters(remove_duplicate=False))
    saved = {name: tensor for name, tensor in model.state_dict().items() if name not in all_named}  # buffers
    named = {name: tensor for name, tensor in all_named.items() if name not in model.all_tied_weights_keys}
    return dict(loading.revert_weight_conversion(model, named | saved))


def as_published(config: DecoderConfig, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The reference's tensors under the published names and in their shapes: traits `resaved`, `equal_parts`."""
    ours = by_name(stored_leaves(config))
    found = dict(zip(published_names(config, ours, theirs), theirs.values(), strict=True))
    for parts in traits_of(family_of(config)).equal_parts:
        for first in (name for name in ours if name.endswith(f".{parts[0]}")):
            names = [first.removesuffix(parts[0]) + part for part in parts]
            rows, sizes = [found[name] for name in names if name in found], [ours[n][0].disk_shape[0] for n in names]
            if sum(map(len, rows)) == sum(sizes):
                found |= dict(zip(names, torch.cat(rows).split(sizes), strict=True))
    return found
