"""Times attention with structured masks: packed documents, sliding windows, very long rows.

    python benchmarks/dev/attention.py             all parts
    python benchmarks/dev/attention.py --quick     a tiny model and one round, to check that everything runs

packed   forward and backward of the 26M Llama of train_step.py on 6 documents in one row of 4,096 tokens: fnmodels with
         a layout against transformers' own form of packing (positions that restart, no mask, no cache, SDPA).
window   attention alone, a window of 512 in 8,192 tokens: kernel="blocks" against SDPA with a dense mask.
long     131,072 tokens: the memory that mask and plan take, and one block's forward with a sliding window.
cuda     on a GPU, in bf16: forward and backward of the same Llama on packed rows, causal and with a window of 512, by
         kernel="varlen", "flex" and "auto" against "sdpa" with a dense mask. Skipped with a message without a GPU.

Contenders take turns within one run; the report has medians and their ratio. Before "packed" is timed, both must agree
on the loss and on all gradients; before "cuda" is timed, every kernel's gradients must be as close to those of
kernel="math" in fp32 as those of kernel="math" in bf16 are.
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import above  # noqa: F401
import torch
import torch.nn.functional as F
from packed_rows import packed_rows
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fnmodels
import params as P
from fnmodels import llama
from fnmodels.inputs import Causal, Window
from fnmodels.ops.attention.select import attention, materialize
from fnmodels.options import ForwardOptions

LENGTHS = (1024, 512, 768, 896, 256, 640)  # 4,096 tokens in 6 documents
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
TINY = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


def take_turns(contenders: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of each, after one round that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, run in contenders.items():
            begin = time.perf_counter()
            run()
            if turn:
                seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def packed(lengths: tuple[int, ...], rounds: int) -> None:
    import transformers

    config = llama.Config.from_hf(CONFIG)
    weights = P.init(config, 0, dtype=torch.float32)
    batch = packed_rows(lengths, 1, config.vocab_size)
    tokens, positions, segment_ids, labels = (batch[n] for n in ("tokens", "positions", "segment_ids", "labels"))

    def loss_of(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)

    model: Any = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **{k: v for k, v in CONFIG.items() if k not in ("model_type", "rope_theta")},
            rope_parameters={"rope_type": "default", "rope_theta": CONFIG["rope_theta"]},
            use_cache=False,
            attn_implementation="sdpa",
        )
    ).train()
    names = llama.hf_names(config)
    model.load_state_dict({names[path]: leaf for path, leaf in P.flatten(weights).items()}, strict=True)
    theirs_leaves = dict(model.named_parameters())

    def theirs() -> tuple[Tensor, dict[str, Tensor]]:
        logits = model(input_ids=tokens, position_ids=positions, attention_mask=None, use_cache=False).logits
        loss = loss_of(logits)
        return loss, dict(zip(theirs_leaves, torch.autograd.grad(loss, list(theirs_leaves.values())), strict=True))

    leaves = {path: leaf.detach().requires_grad_() for path, leaf in P.flatten(weights).items()}

    def ours(kernel: str = "auto") -> tuple[Tensor, dict[str, Tensor]]:
        # Tensors that depend on the batch are made in here, as in a training step.
        inputs, masks, freqs_cis = fnmodels.prepare(config, tokens, positions=positions, segment_ids=segment_ids)
        layout = fnmodels.layout(masks)
        tree = P.unflatten(dict(leaves))
        loss = loss_of(fnmodels.forward(tree, inputs, masks, freqs_cis, config=config, kernel=kernel, layout=layout))
        return loss, dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))

    (loss, grads), (their_loss, their_grads) = ours(), theirs()
    for path, grad in grads.items():
        wanted = their_grads[names[path]]
        off = ((grad - wanted).norm() / wanted.norm()).item()
        assert off < 1e-3, f"The gradient of {path} differs from transformers' by {off:.1e}."
    assert abs(loss.item() - their_loss.item()) < 1e-4, (loss.item(), their_loss.item())
    contenders = {"fnmodels": ours, "fnmodels, dense mask": lambda: ours("sdpa"), "transformers": theirs}
    seconds = take_turns(contenders, rounds)
    print(f"\npacked: {len(lengths)} documents, {tokens.shape[1]} tokens, fp32, forward + backward of the 26M Llama")
    for name, taken in seconds.items():
        rate, ratio = tokens.shape[1] / taken, seconds["transformers"] / taken
        print(f"  {name:24s}{rate:10.0f} tokens/s{ratio:8.2f} x transformers")


def window(length: int, size: int, rounds: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, length, heads, 64, generator=generator, requires_grad=True) for heads in (8, 4, 4))
    positions = torch.arange(length)[None]
    mask = fnmodels.inputs.build_mask(Causal() & Window(size), positions, torch.ones_like(positions))
    layout = fnmodels.layout({"sliding": mask})
    dense = mask.dense()
    plan = materialize(mask, "blocks", layout)

    def ours() -> Tensor:
        return attention(q, k, v, plan, kernel="blocks", scale=0.125, layout=layout)

    def theirs() -> Tensor:
        heads_first = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(*heads_first, attn_mask=dense, enable_gqa=True).transpose(1, 2)

    assert (ours() - theirs()).abs().max() < 1e-5
    upward = torch.randn_like(q)
    print(f"\nwindow: {size} keys in {length} tokens, 8 heads on 4, width 64, fp32")
    for title, wrap in (("forward", without_grad), ("forward + backward", lambda f: with_grad(f, (q, k, v), upward))):
        seconds = take_turns({"blocks": wrap(ours), "dense": wrap(theirs)}, rounds)
        ratio = seconds["dense"] / seconds["blocks"]
        print(f"  {title:24s}{seconds['blocks'] * 1e3:8.1f} ms{seconds['dense'] * 1e3:10.1f} ms dense{ratio:8.2f} x")


def without_grad(function: Callable[[], Tensor]) -> Callable[[], Any]:
    return torch.no_grad()(function)


def with_grad(function: Callable[[], Tensor], inputs: tuple[Tensor, ...], upward: Tensor) -> Callable[[], Any]:
    return lambda: torch.autograd.grad(function(), inputs, upward)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(leaf, Tensor):
                self.numel = max(self.numel, leaf.numel())
        return out


def long(length: int, size: int) -> None:
    config = llama.Config.from_hf(
        CONFIG | {"model_type": "mistral", "sliding_window": size, "max_position_embeddings": length}
    )
    layer = P.init(config, 0, dtype=torch.float32)["layers"][0]
    x = torch.randn(1, length, config.hidden_size)
    segment_ids = torch.ones(1, length, dtype=torch.long)
    positions = torch.arange(length)[None]
    reset_peak()
    before = memory("VmRSS")
    masks = llama.attention_masks(config, positions, segment_ids)
    layout = fnmodels.layout(masks)
    plan = materialize(masks["sliding"], "auto", layout)
    prepared = memory("VmHWM") - before
    table = llama.freqs_cis(config, positions)["sliding"]
    reset_peak()
    before = memory("VmRSS")
    with torch.no_grad(), Largest() as largest:
        begin = time.perf_counter()
        llama.block(layer, x, plan, table, config=config, kind="sliding", options=ForwardOptions(layout=layout))
        taken = time.perf_counter() - begin
    peak = memory("VmHWM") - before
    print(f"\nlong: one row of {length} tokens, a window of {size}, fp32")
    print(f"  mask, layout and plan: peak {prepared / 2**20:.0f} MB over baseline")
    print(f"  one block forward: {taken:.1f} s, peak {peak / 2**20:.0f} MB over baseline; the largest tensor has")
    print(f"  {largest.numel / length:.0f} elements per token (a mask of S x S would have {length})")


def memory(field: str) -> int:
    """A line of /proc/self/status in bytes: VmRSS (now) or VmHWM (peak since the last reset)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def cuda(lengths: tuple[int, ...], rounds: int) -> None:
    if not torch.cuda.is_available():
        print("\ncuda: left out, for torch sees no CUDA device here")
        return
    print(f"\ncuda: {torch.cuda.get_device_name()}, bf16, forward + backward of the 26M Llama")
    for title, own in (("causal", {}), ("window 512", {"model_type": "mistral", "sliding_window": 512})):
        on_cuda(title, llama.Config.from_hf(CONFIG | own), lengths, rounds)


CUDA_KERNELS = ("varlen", "flex", "auto", "sdpa")


def on_cuda(title: str, config: llama.Config, lengths: tuple[int, ...], rounds: int) -> None:
    """Short rows are bound by kernel launches; in the long row, of eight times longer documents, attention matters."""
    weights = P.flatten(P.init(config, 0, dtype=torch.float32, device="cuda"))
    one_row = packed_rows(lengths, 1, config.vocab_size, "cuda")
    exact = gradients_of(one_row, config, weights, "math", torch.float32)

    def errors(kernel: str, exact: Sequence[Tensor]) -> list[float]:
        pairs = zip(gradients_of(one_row, config, weights, kernel, torch.bfloat16), exact, strict=True)
        return [((got.float() - want).norm() / want.norm()).item() for got, want in pairs]

    noise, worst = errors("math", exact), {}
    for kernel in CUDA_KERNELS:
        found = errors(kernel, exact)
        for path, off, bound in zip(weights, found, noise, strict=True):
            assert off < 2 * bound + 1e-3, (
                f"{kernel}: the gradient of {path} is off by {off:.1e}; math's by {bound:.1e}."
            )
        worst[kernel] = max(found)
    for batch in (
        packed_rows(lengths, 4, config.vocab_size, "cuda"),
        packed_rows([8 * n for n in lengths], 1, config.vocab_size, "cuda"),
    ):

        def step(kernel: str, batch: dict[str, Tensor] = batch) -> None:
            gradients_of(batch, config, weights, kernel, torch.bfloat16)
            torch.cuda.synchronize()

        rows, length = batch["tokens"].shape
        print(f"  {title}: {rows} rows of {length} tokens in {len(lengths)} documents")
        seconds = take_turns({kernel: functools.partial(step, kernel) for kernel in CUDA_KERNELS}, rounds)
        for kernel in CUDA_KERNELS:
            rate, ratio = rows * length / seconds[kernel], seconds["sdpa"] / seconds[kernel]
            print(
                f"    {kernel:10s}{rate:12.0f} tokens/s{ratio:8.2f} x sdpa, gradients off by {worst[kernel]:.1e} "
                f"(math in bf16: {max(noise):.1e})"
            )


def gradients_of(
    batch: dict[str, Tensor], config: llama.Config, weights: dict[str, Tensor], kernel: str, dtype: torch.dtype
) -> list[Tensor]:
    parts = {name: batch[name] for name in ("positions", "segment_ids")}
    prepared = fnmodels.prepare(config, batch["tokens"], **parts)
    leaves = {path: leaf.to(dtype).requires_grad_() for path, leaf in weights.items()}
    layout = fnmodels.layout(prepared[1])
    logits = fnmodels.forward(P.unflatten(leaves), *prepared, config=config, kernel=kernel, layout=layout)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten(), ignore_index=-100)
    return list(torch.autograd.grad(loss, list(leaves.values())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model, short rows and one round")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default 5)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of torch (default: all cores)")
    parser.add_argument("parts", nargs="*", help="packed, window, long, cuda (default: all)")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {given.threads} threads")
    rounds = 1 if given.quick else given.rounds
    if given.quick:
        CONFIG.update(TINY)
    parts = given.parts or ["long", "packed", "window", "cuda"]  # long first: its baseline is a fresh process
    if "long" in parts:
        long(2048 if given.quick else 131072, 512)
    if "packed" in parts:
        packed(tuple(n // 16 for n in LENGTHS) if given.quick else LENGTHS, rounds)
    if "window" in parts:
        window(1024 if given.quick else 8192, 512, rounds)
    if "cuda" in parts:
        cuda(tuple(n // 16 for n in LENGTHS) if given.quick else LENGTHS, rounds)


if __name__ == "__main__":
    main()
