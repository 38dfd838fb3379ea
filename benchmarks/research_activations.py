"""Reading and patching activations, for benchmarks/research.py: fnmodels, hooks, TransformerLens and nnsight.

The two libraries are contenders where they are installed. Each gets a copy of the model of transformers.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import io
import os
import tempfile
from typing import Any

import torch
from research_setting import Contenders, Setting
from torch import Tensor

import fnmodels
from fnmodels import research

FEW = ("input", "attention", "mlp")  # taps of each layer
MANY = ("input", "attention.pattern", "attention.z", "attention", "mlp.pre", "mlp.neurons", "mlp")
LENS = dict(  # the names of TransformerLens
    zip(
        MANY,
        ("hook_resid_pre", "attn.hook_pattern", "attn.hook_z", "hook_attn_out", "mlp.hook_pre", "mlp.hook_post")
        + ("hook_mlp_out",),
        strict=True,
    )
)


def missing() -> list[str]:
    """Those of the two libraries that are not installed."""
    names = {"transformer-lens": "transformer_lens", "nnsight": "nnsight"}
    return [name for name, module in names.items() if importlib.util.find_spec(module) is None]


def cache(at: Setting, taps: tuple[str, ...]) -> Contenders:
    """Contenders that return the activations of every layer, flat, in the order of `taps`."""
    kernel = "math" if "attention.pattern" in taps else "auto"
    names = [f"layers.{index}.{tap}" for index in range(at.config.num_hidden_layers) for tap in taps]

    def ours() -> list[Tensor]:
        with torch.no_grad():
            _, tapped = fnmodels.forward(at.params, *at.prepared, config=at.config, kernel=kernel, taps=tuple(names))
        return [tapped[name] for name in names]

    found: Contenders = {"fnmodels": ours, "hooks": functools.partial(_hooked, at, taps)}
    if "transformer-lens" not in missing():
        found["TransformerLens"] = functools.partial(_lens_cached, _lens(at), at, taps)
    if "nnsight" not in missing():
        found["nnsight"] = functools.partial(_nnsight_cached, _nnsight(at), at, taps)
    return found


def _hooked(at: Setting, taps: tuple[str, ...]) -> list[Tensor]:
    found: list[Tensor] = []

    def after(module: Any, inputs: Any, output: Any) -> None:
        found.append(output)

    def before(module: Any, inputs: Any) -> None:
        found.append(inputs[0])

    def after_attention(module: Any, inputs: Any, output: Any) -> None:
        z = [found.pop()] if "attention.z" in taps else []
        pattern = [output[1]] if "attention.pattern" in taps else []
        found.extend([*pattern, *z, output[0]])

    handles = []
    for layer in at.model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        handles += [layer.register_forward_pre_hook(before), attention.register_forward_hook(after_attention)]
        handles += [mlp.register_forward_hook(after)]
        if "attention.z" in taps:
            handles.append(attention.o_proj.register_forward_pre_hook(before))
        if "mlp.pre" in taps:
            handles.append(mlp.gate_proj.register_forward_hook(after))
            handles.append(mlp.down_proj.register_forward_pre_hook(before))
    with torch.no_grad():
        at.run(at.tokens)
    for handle in handles:
        handle.remove()
    return found


def _lens_cached(model: Any, at: Setting, taps: tuple[str, ...]) -> list[Tensor]:
    names = [f"blocks.{index}.{LENS[tap]}" for index in range(at.config.num_hidden_layers) for tap in taps]
    with torch.no_grad():
        _, found = model.run_with_cache(at.tokens, names_filter=names)
    return [found[name] for name in names]


def _nnsight_cached(model: Any, at: Setting, taps: tuple[str, ...]) -> list[Tensor]:
    # Values are asked for in the order of the computation; a module's output comes after those inside of it.
    with torch.no_grad(), model.trace(input_ids=at.tokens, use_cache=False):
        found = list().save()  # noqa: C408  (a literal has no `save`)
        for layer in model.model.layers:
            found.append(layer.input)
            z = [layer.self_attn.o_proj.input] if "attention.z" in taps else []
            attended = layer.self_attn.output
            found.extend([attended[1], *z] if z else [])
            found.append(attended[0])
            if "mlp.pre" in taps:
                found.append(layer.mlp.gate_proj.output)
                found.append(layer.mlp.down_proj.input)
            found.append(layer.mlp.output)
    return list(found)


def grid(at: Setting) -> Contenders:
    """Contenders that patch every position of every layer's output; "rows": all positions of a layer as one batch."""
    clean, corrupt = at.tokens[:1], at.draw(1, at.tokens.shape[1])
    batches = fnmodels.prepare(at.config, clean), fnmodels.prepare(at.config, corrupt)

    def ours() -> list[Tensor]:
        return [research.patch_grid(at.params, *batches, metric, config=at.config, read=(-1,))]

    found: Contenders = {"fnmodels": ours, "hooks": functools.partial(_hooks_grid, at, clean, corrupt)}
    found["hooks, rows"] = functools.partial(_hooks_grid, at, clean, corrupt, rows=True)
    if "transformer-lens" not in missing():
        found["TransformerLens"] = functools.partial(_lens_grid, _lens(at), clean, corrupt)
    if "nnsight" not in missing():
        model = _nnsight(at)
        found["nnsight"] = functools.partial(_nnsight_grid, model, clean, corrupt)
        found["nnsight, rows"] = functools.partial(_nnsight_grid, model, clean, corrupt, rows=True)
    return found


def metric(logits: Tensor) -> Tensor:
    return logits[:, -1, 3].sum() - logits[:, -1, 5].sum()


def metrics(logits: Tensor) -> Tensor:
    """The metric of every row."""
    return logits[:, -1, 3] - logits[:, -1, 5]


@torch.no_grad()
def _hooks_grid(at: Setting, clean: Tensor, corrupt: Tensor, rows: bool = False) -> list[Tensor]:
    values: list[Tensor] = []
    layers, length = at.model.model.layers, clean.shape[1]
    handles = [layer.register_forward_hook(lambda module, inputs, output: values.append(output)) for layer in layers]
    at.run(clean)
    for handle in handles:
        handle.remove()
    cells = torch.arange(length).split(length if rows else 1)
    found = []
    for layer, value in zip(layers, values, strict=True):
        for cell in cells:

            def patch(module: Any, inputs: Any, output: Tensor, cell: Tensor = cell, value: Tensor = value) -> Tensor:
                output = output.clone()
                output[torch.arange(len(cell)), cell] = value[0, cell]
                return output

            handle = layer.register_forward_hook(patch)
            found.append(metrics(at.run(corrupt.expand(len(cell), -1))))
            handle.remove()
    return [torch.cat(found).view(len(layers), length)]


@torch.no_grad()
def _lens_grid(model: Any, clean: Tensor, corrupt: Tensor) -> list[Tensor]:
    """By the library's own patching module, which runs one cell at a time."""
    from transformer_lens import patching

    _, values = model.run_with_cache(clean, names_filter=lambda name: name.endswith("hook_resid_post"))
    names = {"activation_name": "resid_post", "index_axis_names": ("layer", "pos")}
    put = patching.layer_pos_patch_setter
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bar
        return [patching.generic_activation_patch(model, corrupt, values, metric, patch_setter=put, **names)]


@torch.no_grad()
def _nnsight_grid(model: Any, clean: Tensor, corrupt: Tensor, rows: bool = False) -> list[Tensor]:
    with model.trace(input_ids=clean, use_cache=False):
        values = list().save()  # noqa: C408
        for layer in model.model.layers:
            values.append(layer.output)
    length = clean.shape[1]
    found = []
    for layer, value in zip(model.model.layers, values, strict=True):
        for cell in torch.arange(length).split(length if rows else 1):
            with model.trace(input_ids=corrupt.expand(len(cell), -1), use_cache=False):
                layer.output[torch.arange(len(cell)), cell] = value[0, cell]
                last = metrics(model.output.logits).save()
            found.append(last)
    return [torch.cat(found).view(-1, length)]


@functools.cache
def _tokenizer(vocabulary: int) -> Any:
    """TransformerLens reads a tokenizer from a folder, also where it gets token ids alone."""
    import transformers
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({str(i): i for i in range(vocabulary)}, unk_token="0"))
    special = {"pad_token": "0", "bos_token": "1", "eos_token": "2", "unk_token": "0"}
    folder = tempfile.mkdtemp()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


def _lens(at: Setting) -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformer_lens.model_bridge import TransformerBridge

    tokenizer = _tokenizer(at.config.vocab_size)
    return TransformerBridge.boot_transformers("llama", hf_model=copy.deepcopy(at.model), tokenizer=tokenizer)


def _nnsight(at: Setting) -> Any:
    from nnsight import NNsight

    return NNsight(copy.deepcopy(at.model))
