"""Measures memory of training adapters on nf4 weights: fnmodels beside PEFT with bitsandbytes, on the same checkpoint.

    python benchmarks/dev/qlora.py                     a Llama of 130 million parameters, 256 tokens
    python benchmarks/dev/qlora.py --hidden 64 --layers 1 --tokens 16

bitsandbytes (its CPU form) must be installed. It quantizes the model, which transformers saves. Each reading is a
process of its own that loads the folder in fp32 beside nf4 and takes three steps of AdamW with adapters of rank 8 on
every linear weight of the layers. Peak is the largest resident memory after the imports, above that before the loading.
All layers are recomputed in the backward pass by both. The first loss must agree: adapters begin at zero.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
STEPS = 3


def memory(key: str) -> int:
    """Bytes of this process in memory: now (VmRSS), or at most so far (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


def make(folder: Path, hidden: int, layers: int) -> None:
    """Saves a random Llama in nf4 with nested scales, by transformers and bitsandbytes."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": hidden, "intermediate_size": hidden * 11 // 4, "num_hidden_layers": layers}
    config = LlamaConfig(**sizes, vocab_size=8192, num_attention_heads=hidden // 32, max_position_embeddings=2048)
    with tempfile.TemporaryDirectory() as plain:
        LlamaForCausalLM(config).save_pretrained(plain)
        settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
        AutoModelForCausalLM.from_pretrained(plain, quantization_config=settings).save_pretrained(folder)


def with_fnmodels(folder: Path, tokens: Tensor) -> tuple[list[float], int]:
    """(losses, bytes that were resident before the loading)."""
    import fnmodels
    import params as P
    import train

    before = memory("VmRSS")
    config, params = P.load_pretrained(folder, dtype=torch.float32, keep_quantized=True)
    params = P.lora.add(config, params, rank=8, targets=TARGETS, seed=0)
    optimizer = train.adamw(1e-4, spec=P.lora.spec(config, params))
    step = train.make_step(functools.partial(train.next_token_loss, config=config), optimizer, remat="full")
    batch = fnmodels.pack([tokens.tolist()], len(tokens)).batch()
    state, losses = train.init_state(params, optimizer), []
    del params  # the state has copies
    for _ in range(STEPS):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, before


def with_peft(folder: Path, tokens: Tensor) -> tuple[list[float], int]:
    """The same by transformers, PEFT and bitsandbytes."""
    import bitsandbytes  # noqa: F401  (before the measured part)
    from peft import LoraConfig, get_peft_model
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    before = memory("VmRSS")
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model = get_peft_model(model, LoraConfig(r=8, target_modules=list(TARGETS), task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], 1e-4)
    model.train()
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=tokens[None], labels=tokens[None], use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses, before


READERS = {"fnmodels": with_fnmodels, "PEFT + bitsandbytes": with_peft}


def child(name: str, folder: Path, count: int) -> None:
    torch.set_num_threads(1)
    tokens = torch.randint(3, 8192, (count,), generator=torch.Generator().manual_seed(0))
    losses, before = READERS[name](folder, tokens)
    print(json.dumps({"losses": losses, "peak": memory("VmHWM") - before}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--child", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child[0], Path(arguments.child[1]), arguments.tokens)
        return
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), arguments.hidden, arguments.layers)
        size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
        print(f"nf4 checkpoint of {size / 1e6:.0f} MB\n\n| reader | peak | first loss |\n| --- | --- | --- |")
        results: dict[str, Any] = {}
        for name in READERS:
            command = [sys.executable, __file__, "--tokens", str(arguments.tokens), "--child", name, folder]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            results[name] = json.loads(done.stdout.splitlines()[-1])
            print(f"| {name} | {results[name]['peak'] / 1e6:.0f} MB | {results[name]['losses'][0]:.4f} |")
    first, other = (one["losses"][0] for one in results.values())
    if abs(first - other) > 1e-3 * other:
        sys.exit(f"the first losses differ: {first} and {other}")


if __name__ == "__main__":
    main()
