"""One contender in one process: builds its model from the shared file, then takes steps on request.

`python contenders.py` reads one JSON request per line and answers each with one JSON line. A process per contender
separates memory peaks and lets each library have its own environment: nothing here is imported before it is
needed, and only the standard library and numpy are needed by all.

A builder returns (step, weights): step() runs forward, backward and AdamW on the batch and returns the loss as a float
(which waits for the result); weights() returns {Hugging Face name: fp32 array}.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Flat = dict[str, Any]
Built = tuple[Callable[[], float], Callable[[], Flat]]

LR, DECAY, BETAS, EPS = 1e-3, 0.0, (0.9, 0.999), 1e-8


def transformers_llama(config: dict[str, Any], flat: Flat) -> Any:
    """The model in fp32 with these weights."""
    import torch
    import transformers

    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config["vocab_size"],
            hidden_size=config["dim"],
            intermediate_size=config["ffn"],
            num_hidden_layers=config["layers"],
            num_attention_heads=config["heads"],
            num_key_value_heads=config["kv_heads"],
            max_position_embeddings=config["sequence"],
            rms_norm_eps=config["rms_norm_eps"],
            rope_parameters={"rope_type": "default", "rope_theta": config["rope_theta"]},
            tie_word_embeddings=False,
            use_cache=False,
            attn_implementation="sdpa",
        )
    )
    model.load_state_dict({name: torch.from_numpy(leaf) for name, leaf in flat.items()}, strict=True)
    return model


def build_transformers(config: dict[str, Any], flat: Flat, batch: Flat, dtype: str, compiled: bool) -> Built:
    import torch

    model = transformers_llama(config, flat)
    model.to(getattr(torch, dtype)).train()
    tokens = torch.from_numpy(batch["tokens"])
    # Hugging Face shifts by itself: labels = tokens makes the last position of a row the only one without a target.
    call = torch.compile(model) if compiled else model
    forward = functools.partial(call, input_ids=tokens, labels=tokens, use_cache=False)
    step = torch_step(model, lambda: forward().loss)
    return step, lambda: {name: wide(leaf) for name, leaf in model.state_dict().items()}


def litgpt_llama(config: dict[str, Any], flat: Flat) -> Any:
    """The model in fp32 with these weights."""
    import torch
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama

    settings = Config(
        name="bench",
        block_size=config["sequence"],
        vocab_size=config["vocab_size"],
        padded_vocab_size=config["vocab_size"],
        n_layer=config["layers"],
        n_head=config["heads"],
        n_query_groups=config["kv_heads"],
        n_embd=config["dim"],
        intermediate_size=config["ffn"],
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=config["rms_norm_eps"],
        mlp_class_name="LLaMAMLP",
        rope_base=config["rope_theta"],
    )
    model = GPT(settings)
    state: Flat = {}
    weights = {name: torch.from_numpy(leaf) for name, leaf in flat.items()}
    copy_weights_hf_llama(settings, {}, state, weights)
    model.load_state_dict(state, strict=True)
    return model


def build_litgpt(config: dict[str, Any], flat: Flat, batch: Flat, dtype: str, compiled: bool) -> Built:
    import torch
    from litgpt.utils import chunked_cross_entropy

    model = litgpt_llama(config, flat).to(getattr(torch, dtype)).train()
    tokens, labels = torch.from_numpy(batch["tokens"]), torch.from_numpy(batch["labels"])
    call = torch.compile(model) if compiled else model

    def to_hf() -> Flat:
        named = dict(model.state_dict())
        heads = [config[key] * config["head_dim"] for key in ("heads", "kv_heads", "kv_heads")]
        short = {"attn.proj": "self_attn.o_proj", "norm_1": "input_layernorm", "norm_2": "post_attention_layernorm"}
        short |= {"mlp.fc_1": "mlp.gate_proj", "mlp.fc_2": "mlp.up_proj", "mlp.proj": "mlp.down_proj"}
        out = {"model.embed_tokens.weight": named["transformer.wte.weight"]}
        out |= {"model.norm.weight": named["transformer.ln_f.weight"], "lm_head.weight": named["lm_head.weight"]}
        for i in range(config["layers"]):
            here, there = f"transformer.h.{i}", f"model.layers.{i}"
            out |= {f"{there}.{new}.weight": named[f"{here}.{old}.weight"] for old, new in short.items()}
            for letter, part in zip("qkv", named[f"{here}.attn.qkv.weight"].split(heads), strict=True):
                out[f"{there}.self_attn.{letter}_proj.weight"] = part
        return {name: wide(leaf) for name, leaf in out.items()}

    return torch_step(model, lambda: chunked_cross_entropy(call(tokens), labels)), to_hf


def our_llama(config: dict[str, Any], flat: Flat) -> tuple[Any, Any]:
    """(Config, params in fp32) of the same model."""
    import torch

    import params as P
    from fnmodels import llama

    ours = llama.Config.from_hf(
        {
            "model_type": "llama",
            "vocab_size": config["vocab_size"],
            "hidden_size": config["dim"],
            "intermediate_size": config["ffn"],
            "num_hidden_layers": config["layers"],
            "num_attention_heads": config["heads"],
            "num_key_value_heads": config["kv_heads"],
            "max_position_embeddings": config["sequence"],
            "rms_norm_eps": config["rms_norm_eps"],
            "rope_theta": config["rope_theta"],
            "tie_word_embeddings": False,
        }
    )
    return ours, P.unflatten({path: torch.from_numpy(flat[name]) for path, name in llama.hf_names(ours).items()})


def our_batch(batch: Flat) -> Flat:
    """Its tokens and labels with the positions and segments of plain rows."""
    import torch

    tokens = torch.from_numpy(batch["tokens"])
    return {
        "tokens": tokens,
        "positions": torch.arange(tokens.shape[1]).expand_as(tokens),
        "segment_ids": torch.ones_like(tokens),
        "labels": torch.from_numpy(batch["labels"]),
    }


def build_fnmodels(config: dict[str, Any], flat: Flat, batch: Flat, dtype: str, compiled: bool) -> Built:
    import torch

    import params as P
    import train
    from fnmodels import llama, tree

    ours, weights = our_llama(config, flat)
    weights = tree.map(lambda leaf: leaf.to(getattr(torch, dtype)), weights)
    names = llama.hf_names(ours)
    optimizer = train.adamw(LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    take = train.make_step(
        functools.partial(train.next_token_loss, config=ours), optimizer, compile="block" if compiled else "none"
    )
    inputs = our_batch(batch)
    held = [train.init_state(weights, optimizer)]
    del weights

    def step() -> float:
        held[0], metrics = take(held[0], inputs)
        return float(metrics["loss"])

    def to_hf() -> Flat:
        return {names[path]: wide(leaf) for path, leaf in P.flatten(held[0].params).items()}

    return step, to_hf


def build_jax(config: dict[str, Any], flat: Flat, batch: Flat, dtype: str, compiled: bool) -> Built:
    import jax
    import jax_llama

    held = [jax_llama.init_state(flat, config["layers"], dtype)]
    take = jax_llama.make_step(config, lr=LR, decay=DECAY)
    tokens, labels = (jax.device_put(batch[name].astype(np.int32)) for name in ("tokens", "labels"))

    def step() -> float:
        held[0], loss = take(held[0], tokens, labels)
        jax.block_until_ready(held[0])
        return float(loss)

    def to_hf() -> Flat:
        return {name: np.asarray(leaf, np.float32) for name, leaf in jax_llama.flat(held[0][0], list(flat)).items()}

    return step, to_hf


BUILDERS: dict[str, Callable[..., Built]] = {
    "fnmodels": build_fnmodels,
    "transformers": build_transformers,
    "litgpt": build_litgpt,
    "jax": build_jax,
}


def torch_step(model: Any, loss_fn: Callable[[], Any]) -> Callable[[], float]:
    """The usual loop of a stateful model: backward, fused AdamW, gradients freed."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True)

    def step() -> float:
        loss = loss_fn()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def wide(leaf: Any) -> Any:
    return leaf.detach().float().numpy()


def matmul_peak(dtype: str, size: int, repeats: int = 6) -> float:
    """Best FLOP/s of a square matmul in this dtype or in fp32, torch's own or oneDNN's: 2 * size^3 FLOPs each."""
    import torch

    kinds, seconds = {torch.float32}, []  # on some CPUs fp32 products are faster than bf16 ones
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():  # otherwise torch multiplies bf16 in a plain loop
        kinds.add(getattr(torch, dtype))
    for kind in kinds:
        left, right = (torch.randn(size, size).to(kind) for _ in range(2))
        for _ in range(repeats):
            for product in (torch.matmul, lambda x, y: torch.ops.mkldnn._linear_pointwise(x, y, None, "none", [], "")):
                start = time.perf_counter()
                product(left, right)
                seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


def memory(field: str) -> int:
    """Bytes of VmRSS (resident now) or VmHWM (its peak since the last reset); 0 without /proc."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith(field))


def reset_peak() -> None:
    """Resets VmHWM, so that the peak of the steps is not hidden by that of compiling or importing."""
    refs = Path("/proc/self/clear_refs")
    if refs.exists():
        refs.write_text("5")


def prepare_process(threads: int, library: str) -> None:
    """Hold the process to `threads` cores before any library counts them."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if library != "jax":
        import torch

        torch.set_num_threads(threads)


def serve(requests: Any, answer: Callable[[dict[str, Any]], None]) -> None:
    step: Callable[[], float]
    weights: Callable[[], Flat]
    for line in requests:
        request = json.loads(line)
        kind = request.pop("kind")
        if kind == "build":
            library = request.pop("library")
            prepare_process(request.pop("threads"), library)
            version = "this checkout" if library == "fnmodels" else importlib.metadata.version(library)
            if library != "fnmodels":
                importlib.import_module(library)
            stored = np.load(request.pop("data"))
            before = memory("VmRSS")
            flat = {name: stored[name] for name in stored.files if "." in name}
            batch = {name: stored[name] for name in ("tokens", "labels")}
            step, weights = BUILDERS[library](flat=flat, batch=batch, **request)
            del flat
            answer({"version": version, "before": before})
        elif kind == "steps":
            seconds, losses = [], []
            for _ in range(request["count"]):
                start = time.perf_counter()
                losses.append(step())
                seconds.append(time.perf_counter() - start)
            answer({"seconds": seconds, "losses": losses})
        elif kind == "weights":
            np.savez(request["path"], **weights())
            answer({})
        elif kind == "reset_peak":
            reset_peak()
            answer({})
        elif kind == "memory":
            answer({"peak": memory("VmHWM")})
        elif kind == "matmul":
            answer({"flops": matmul_peak(request["dtype"], request["size"])})


def main() -> None:
    # Libraries print: the answers get the real stdout, everything else goes to stderr.
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=channel, flush=True)

    try:
        serve(sys.stdin, answer)
    except Exception as error:  # the parent reports it and continues with the other contenders
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
