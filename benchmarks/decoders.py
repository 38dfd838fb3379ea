"""The contenders of generate.py: greedy decoding of rows that hold one context, by each library's own cache.

litgpt and llama.cpp (`llama_cpp` and `gguf`) take part where they are installed, see benchmarks/results/generate.md.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from contenders import litgpt_llama
from torch import Tensor

import fnmodels

Flat = dict[str, Any]


@dataclass(frozen=True)
class Decoder:
    """step: tokens [B] -> logits [B, V]; rewind: back to the context."""

    step: Callable[[Tensor], Tensor]
    rewind: Callable[[], None]


@dataclass(frozen=True)
class Start:
    """What all contenders begin with: the context's tokens [1, C] in each of `rows` rows, room for `steps` more."""

    context: Tensor
    rows: int
    steps: int
    dtype: torch.dtype
    recurrent: bool = False  # caches cannot be cut, so they are copied

    @property
    def length(self) -> int:
        return self.context.shape[1]

    @property
    def room(self) -> int:
        return self.length + self.steps


def installed(*modules: str) -> bool:
    return all(importlib.util.find_spec(module) is not None for module in modules)


def ours(
    params: Any, config: Any, start: Start, *, kernel: str = "auto", step: fnmodels.cache.DecodingStep | None = None
) -> Decoder:
    """`decode_`, or `step` of `compiled_step` or `captured_step`."""
    cache = fnmodels.init_cache(config, 1, start.room, dtype=start.dtype, device=start.context.device)
    prepared = fnmodels.prepare_step(config, start.context, cache)
    _, cache = fnmodels.decode_(params, *prepared, cache, config=config, at="last", kernel=kernel)
    room = fnmodels.init_cache(config, start.rows, start.room, dtype=start.dtype, device=start.context.device)
    held = [fnmodels.cache.insert_(room, range(start.rows), fnmodels.take(cache, [0] * start.rows))]

    def decode(tokens: Tensor) -> Tensor:
        if step is not None:
            logits, held[0] = step(params, tokens[:, None], held[0])
            return logits[:, 0]
        prepared = fnmodels.prepare_step(config, tokens[:, None], held[0])
        logits, held[0] = fnmodels.decode_(params, *prepared, held[0], config=config, at="last", kernel=kernel)
        return logits

    first = fnmodels.take(held[0], range(start.rows)) if start.recurrent else None

    def rewind() -> None:
        copied = first is not None
        held[0] = fnmodels.take(first, range(start.rows)) if copied else fnmodels.truncate(held[0], start.length)

    return Decoder(decode, rewind)


def transformers(model: Any, start: Start, *, static: bool) -> Decoder:
    """The model's own forward, without `generate`, with a DynamicCache or a StaticCache."""
    from transformers import DynamicCache, StaticCache

    grown, fixed = DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=start.room)
    cache = fixed if static else grown
    if start.recurrent:
        model(start.context.expand(start.rows, -1), past_key_values=cache, use_cache=True, logits_to_keep=1)
    else:  # rows are copied
        model(start.context, past_key_values=grown, use_cache=True, logits_to_keep=1)
        grown.batch_repeat_interleave(start.rows)
        for index, layer in enumerate(grown.layers if static else []):
            fixed.update(layer.keys, layer.values, index)
    held, taken, first = [cache], [0], copy.deepcopy(cache) if start.recurrent else None

    def step(tokens: Tensor) -> Tensor:
        out = model(tokens[:, None], past_key_values=held[0], use_cache=True)
        taken[0] += 1
        logits: Tensor = out.logits[:, -1]
        return logits

    def rewind() -> None:
        if first is None:
            held[0].crop(-taken[0])
        else:
            held[0] = copy.deepcopy(first)
        taken[0] = 0

    return Decoder(step, rewind)


def litgpt(given: dict[str, Any], flat: Flat, start: Start) -> Decoder:
    """litgpt's model with its cache, of which each step reads what is filled, as its `generate` does."""
    model = litgpt_llama(given, flat).to(start.dtype).eval()
    model.max_seq_length = start.room
    model.set_kv_cache(start.rows, dtype=start.dtype)
    at = [start.length]
    model(start.context.expand(start.rows, -1)[:1], torch.arange(start.length), start.length)
    for block in model.transformer.h:
        for held in (block.attn.kv_cache.k, block.attn.kv_cache.v):
            held.copy_(held[:1].expand_as(held))

    def step(tokens: Tensor) -> Tensor:
        logits: Tensor = model(tokens[:, None], torch.tensor([at[0]]), at[0] + 1)[:, -1]
        at[0] += 1
        return logits

    def rewind() -> None:
        at[0] = start.length

    return Decoder(step, rewind)


def write_gguf(path: Path, given: dict[str, Any], flat: Flat, kind: str) -> None:
    """The model for llama.cpp; kind: "float32", "bfloat16", "int8" (Q8_0) or "int4" (Q4_0), all but the ends.

    llama.cpp rotates neighbours, where Hugging Face's files rotate halves: rows of queries and keys are put in order.
    """
    import gguf

    types = gguf.GGMLQuantizationType
    wide = types.F32 if kind == "float32" else types.BF16
    matrix = {"int8": types.Q8_0, "int4": types.Q4_0}.get(kind, wide)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(given["sequence"])
    writer.add_embedding_length(given["dim"])
    writer.add_block_count(given["layers"])
    writer.add_feed_forward_length(given["ffn"])
    writer.add_head_count(given["heads"])
    writer.add_head_count_kv(given["kv_heads"])
    writer.add_layer_norm_rms_eps(given["rms_norm_eps"])
    writer.add_rope_freq_base(given["rope_theta"])
    writer.add_vocab_size(given["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, given["layers"])
    heads = {"q_proj": given["heads"], "k_proj": given["kv_heads"]}
    for name, leaf in flat.items():
        part = name.split(".")[-2]
        if part in heads:
            leaf = leaf.reshape(heads[part], 2, -1, leaf.shape[1]).swapaxes(1, 2).reshape(leaf.shape)
        of = types.F32 if leaf.ndim == 1 else wide if part in ("lm_head", "embed_tokens") else matrix
        data = gguf.quants.quantize(np.ascontiguousarray(leaf), of)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), data, raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@functools.cache
def silent_llama_cpp() -> tuple[Any, Any]:
    """(the bindings, the function that drops messages, which C code calls as long as the process lives)."""
    import llama_cpp as api

    drop = api.llama_log_callback(lambda level, text, data: None)
    api.llama_log_set(drop, ctypes.c_void_p(0))
    return api, drop


def llama_cpp(path: Path, vocab: int, start: Start, threads: int) -> Decoder:
    """llama.cpp on the file of `write_gguf`; keys and values in fp32 or, with other weights, its default, fp16."""
    api, _ = silent_llama_cpp()
    model = api.llama_model_load_from_file(str(path).encode(), api.llama_model_default_params())
    how = api.llama_context_default_params()
    how.n_seq_max, how.n_batch, how.n_threads, how.n_threads_batch = start.rows, 512, threads, threads
    how.n_ctx = start.rows * -(-start.room // 256) * 256
    if start.dtype is torch.float32:
        how.type_k = how.type_v = api.GGML_TYPE_F32
        how.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_DISABLED  # which sums in fp16: logits were 1.5e-3 off
    context = api.llama_init_from_model(model, how)
    assert model and context, f"llama.cpp does not read {path}."
    memory, batch, at = api.llama_get_memory(context), api.llama_batch_init(512, 0, 1), [start.length]

    def decode(tokens: list[int], positions: list[int], rows: list[int], wanted: list[bool]) -> None:
        batch.n_tokens = len(tokens)
        for i, (token, position, row, last) in enumerate(zip(tokens, positions, rows, wanted, strict=True)):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, last
            batch.seq_id[i][0] = row
        code = api.llama_decode(context, batch)
        assert code == 0, f"llama_decode returned {code}."

    for begin in range(0, start.length, 512):
        part = start.context[0, begin : begin + 512].tolist()
        decode(part, list(range(begin, begin + len(part))), [0] * len(part), [False] * (len(part) - 1) + [True])
    for row in range(1, start.rows):
        api.llama_memory_seq_cp(memory, 0, row, -1, -1)
    order = list(range(start.rows))

    def step(tokens: Tensor) -> Tensor:
        decode(tokens.tolist(), [at[0]] * start.rows, order, [True] * start.rows)
        at[0] += 1
        found = np.ctypeslib.as_array(api.llama_get_logits(context), (start.rows, vocab))
        return torch.from_numpy(found.copy())

    def rewind() -> None:
        for row in order:
            api.llama_memory_seq_rm(memory, row, start.length, -1)
        at[0] = start.length

    return Decoder(step, rewind)
