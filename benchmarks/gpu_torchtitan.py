"""torchtitan's Llama (0.2.2) as a contender of gpu.py, where that package is on the path; its wheel alone is enough.

Its `model.py` and `attention.py` run unchanged, as its trainer runs them: SDPA for rows of one document, varlen
attention for packed rows, and where layers are compiled, the loss is too. The trainer itself is not imported: it needs
many more libraries, and private names of one release of torch.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from gpu_twin import Step, module_step, one_document
from torch import Tensor, nn

import fnmodels
import params as P
from fnmodels import llama
from fnmodels.inputs.convert import to_cu_seqlens
from fnmodels.tree import Tree

MODEL = "torchtitan.models.llama3.model"
NAMES = {
    "attention.q_proj": "attention.wq",
    "attention.k_proj": "attention.wk",
    "attention.v_proj": "attention.wv",
    "attention.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "embed_tokens": "tok_embeddings",
    "lm_head": "output",
}


@functools.cache  # `model_code` hides it
def folder() -> Path | None:
    """The folder of torchtitan; None without it and for a release whose Llama is in other files."""
    found = importlib.util.find_spec("torchtitan")
    places = [] if found is None else [Path(place) for place in found.submodule_search_locations or ()]
    return next((place for place in places if (place / "models/llama3/model/model.py").is_file()), None)


def model_code() -> Any:
    """The module `model.py`, with stand-ins for all it imports of torchtitan but `args.py` and `attention.py`."""
    place = folder()
    assert place is not None
    for name in ("torchtitan", "torchtitan.models", "torchtitan.models.llama3", MODEL):
        package = stand_in(name)
        package.__path__ = [str(place.joinpath(*name.split(".")[1:]))]
    stand_in("torchtitan.components.tokenizer", BaseTokenizer=object)
    stand_in("torchtitan.config", JobConfig=object)
    stand_in("torchtitan.models.utils", trunc_normal_=None, get_dense_model_nparams_and_flops=None)
    stand_in("torchtitan.protocols.model", AttentionMasksType=Any, BaseModelArgs=object)
    stand_in("torchtitan.protocols.train_spec", ModelProtocol=Protocol)
    stand_in("torchtitan.tools.logging", logger=logging.getLogger("torchtitan"))
    return importlib.import_module(f"{MODEL}.model")


def stand_in(name: str, **members: Any) -> Any:
    """A module without a file, which later imports find."""
    module = sys.modules.setdefault(name, ModuleType(name))
    vars(module).update(members)
    return module


class Protocol(nn.Module):
    """The base class of its models, which drops the argument."""

    def __init__(self, _: Any) -> None:
        super().__init__()


def torchtitan_model(config: llama.Config, weights: Tree, *, length: int, packed: bool) -> Any:
    code = model_code()
    args = code.TransformerModelArgs(
        dim=config.hidden_size,
        n_layers=config.num_hidden_layers,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        vocab_size=config.vocab_size,
        multiple_of=config.intermediate_size,  # the width of the MLP is the least multiple over a share of 8/3 width
        ffn_dim_multiplier=0.1,
        norm_eps=config.rms_norm_eps,
        rope_theta=5e5,
        rope_scaling_args=code.RoPEScalingArgs(scaling_factor=1.0),
        max_seq_len=length,
        attn_type="varlen" if packed else "sdpa",
    )
    with torch.device("meta"):
        model = code.Transformer(args)
    state = {their_name(path): theirs(path, leaf, config) for path, leaf in P.flatten(weights).items()}
    model.load_state_dict(state, strict=True, assign=True)
    with state["norm.weight"].device:
        model.freqs_cis = model._precompute_freqs_cis()
    return model


def their_name(path: str) -> str:
    start, at, rest = path.partition(".")
    layer, _, name = rest.partition(".")
    return f"{start}.{layer}.{NAMES[name]}.weight" if at else f"{NAMES.get(path, path)}.weight"


def theirs(path: str, leaf: Tensor, config: llama.Config) -> Tensor:
    """The weight; for queries and keys with rows in its order, in which a pair to turn is two neighbours."""
    if not path.endswith((".q_proj", ".k_proj")):
        return leaf
    return leaf.unflatten(0, (-1, 2, config.head_dim // 2)).transpose(1, 2).flatten(0, 2).contiguous()


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """torchtitan.components.loss.cross_entropy_loss"""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1), reduction="sum", ignore_index=-100)


def torchtitan_step(
    config: llama.Config, fresh: Callable[[], Tree], batch: dict[str, Tensor], *, compiled: bool
) -> Step:
    tokens, labels = batch["tokens"], batch["labels"]
    packed = not one_document(batch)
    model = torchtitan_model(config, fresh(), length=tokens.shape[1], packed=packed)
    given = documents(config, batch) if packed else {}
    loss_of = loss_sum
    if compiled:
        loss_of = torch.compile(loss_sum)
        for layer in model.layers.values():
            layer.compile(fullgraph=True)
    count = (labels != -100).sum()
    return module_step(model, lambda: loss_of(model(tokens, **given), labels) / count)


def documents(config: llama.Config, batch: dict[str, Tensor]) -> dict[str, Any]:
    """Its arguments for packed rows; its own function finds documents by a token that ends each, which ours lack."""
    if not batch["tokens"].is_cuda:
        raise NotImplementedError("torchtitan's packed rows need varlen attention, which runs on CUDA")
    own = {name: batch[name] for name in ("positions", "segment_ids")}
    layout = fnmodels.layout(fnmodels.prepare(config, batch["tokens"], **own)[1])
    assert layout is not None
    found = to_cu_seqlens(layout, device=batch["tokens"].device)
    code = importlib.import_module("torchtitan.models.attention")
    masks = code.VarlenMetadata(found.offsets, found.offsets, found.longest, found.longest)
    return {"attention_masks": masks, "positions": batch["positions"]}
