"""Weights kept as the file has them are the dequantized model: outputs, gradients, transforms; in the file's memory."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import params as P
import train
from fnmodels import gpt_oss, llama, tree
from params.quantized.kept import KeptWeight
from params.quantized.written import by_path
from tests.params.quantized import test_block_scales as blocks
from tests.params.quantized import test_dialects, test_integers
from tests.params.quantized.dialects import DIALECTS
from tests.support.cases import batch_of, generic_params, off, segments

FILE = "model.safetensors"


def mxfp4_checkpoint(folder: Path) -> None:
    """gpt-oss, whose experts' gate and up are interleaved rows of one tensor."""
    config = gpt_oss.Config(
        vocab_size=40,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    P.save_pretrained(folder, config, generic_params(config, torch.bfloat16))
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / FILE).items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, width, out = tensor.shape
            draw = torch.Generator().manual_seed(out)
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, out, width // 32, 16), generator=draw).byte()
            tensors[f"{name}_scales"] = torch.randint(118, 124, (experts, out, width // 32), generator=draw).byte()
        else:
            tensors[name] = tensor
    blocks.rewrite(folder, tensors, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": []})


def bitsandbytes_checkpoint(folder: Path, kind: str) -> None:
    """Mixtral with attention and experts in nf4 or int8, as bitsandbytes stores the weights that it was made with."""
    config = test_integers.CONFIGS["mixtral"]
    P.save_pretrained(folder, config, generic_params(config, torch.bfloat16))
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / FILE).items():
        if not (".experts." in name or name.endswith("_proj.weight")):
            tensors[name] = tensor
        elif kind == "int8":
            most = tensor.float().abs().amax(1)
            tensors[name] = (tensor.float() / most[:, None] * 127).round().to(torch.int8)
            stem = name.removesuffix(".weight")
            tensors |= {f"{stem}.SCB": most, f"{stem}.weight_format": torch.tensor(0, dtype=torch.uint8)}
        else:
            groups = tensor.float().view(-1, 64)
            most, table = groups.abs().amax(1), torch.linspace(-1, 1, 16)
            codes = (groups / most[:, None] - table[:, None, None]).abs().argmin(0).flatten()
            state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(tensor.shape)}
            packed = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
            tensors[name] = (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None]
            tensors |= {f"{name}.absmax": most, f"{name}.quant_map": table}
            tensors[f"{name}.quant_state.bitsandbytes__nf4"] = packed
    bits = {"load_in_8bit": True} if kind == "int8" else {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    blocks.rewrite(folder, tensors, quantization_config={"quant_method": "bitsandbytes", **bits})


CHECKPOINTS: dict[str, Any] = {
    **{f"{name} fp8": lambda folder, c=config: blocks.write(folder, c) for name, config in blocks.CONFIGS.items()},
    **{
        f"{name} {form}": lambda folder, c=config, s=said: test_integers.write(folder, c, s)
        for name, config in test_integers.CONFIGS.items()
        for form, said in test_integers.FORMS.items()
        if form in ("gptq", "awq", "packed, zeros and order", "int8")
    },
    "gpt_oss mxfp4": mxfp4_checkpoint,
    "mixtral bitsandbytes nf4": lambda folder: bitsandbytes_checkpoint(folder, "nf4"),
    "mixtral bitsandbytes int8": lambda folder: bitsandbytes_checkpoint(folder, "int8"),
}


EXPERTS = ("gpt_oss mxfp4", "mixtral gptq", "mixtral int8", "deepseek fp8")


def kept_leaves(params: Any) -> Iterator[KeptWeight]:
    if isinstance(params, KeptWeight):
        yield params
    for child in params.values() if isinstance(params, dict) else params if isinstance(params, list) else ():
        yield from kept_leaves(child)


def both(folder: Path, **options: Any) -> tuple[Any, Any, Any]:
    config, plain = P.load_pretrained(folder, **options)
    return config, plain, P.load_pretrained(folder, keep_quantized=True, **options)[1]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_kept_model_is_the_dequantized_one(name: str, tmp_path: Path) -> None:
    """Logits on each kernel, and gradients of what is before and after kept weights; experts included."""
    CHECKPOINTS[name](tmp_path)
    config, plain, kept = both(tmp_path, dtype=torch.float32)
    assert len(list(kept_leaves(kept))) >= 6
    assert any(leaf.ndim == 3 for leaf in kept_leaves(kept)) == (hasattr(config, "num_experts_per_tok"))
    back = tree.flatten(P.dequantize(kept))
    assert all(torch.equal(leaf, back[path]) for path, leaf in tree.flatten(plain).items())
    batch = batch_of(config, segments((7, 5), (12,)))
    for options in ({}, {"kernel": "math"}, {"kernel": "invariant"}):
        with torch.no_grad():
            assert off(batch.forward(kept, **options), batch.forward(plain, **options)) < 1e-5
    grads = []
    for params in (plain, kept):
        embedding = params["embed_tokens"].clone().requires_grad_()
        loss = batch.forward({**params, "embed_tokens": embedding}).square().mean()
        grads.append(torch.autograd.grad(loss, embedding)[0])
    assert off(grads[1], grads[0]) < 1e-5


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_kept_model_is_written_as_it_was_read(name: str, tmp_path: Path) -> None:
    """Fused rows and experts too: the same names, bytes and declaration; and by shards of any size."""
    CHECKPOINTS[name](tmp_path / "in")
    config, kept = P.load_pretrained(tmp_path / "in", keep_quantized=True)
    P.save_pretrained(tmp_path / "out", config, kept)
    read, written = (load_file(tmp_path / place / FILE) for place in ("in", "out"))
    quantized = {path for path, leaf in by_path(kept).items() if isinstance(leaf, KeptWeight)}
    assert len(quantized) >= 6
    unchanged = {name for name, tensor in read.items() if name in written and tensor.dtype == written[name].dtype}
    for tensor_name in unchanged:
        assert torch.equal(*(each[tensor_name].flatten().view(torch.uint8) for each in (read, written)))
    differing = (read.keys() | written.keys()) - unchanged
    expected = {"deepseek": "kv_b_proj", "phi3": "gate_up_proj" if "fp8" in name else "-"}  # with rows that are plain
    part = expected.get(name.split()[0], "-")
    assert all(part in one or (part != "-" and "qkv_proj" in one) for one in differing), differing
    said, again = (json.loads((tmp_path / place / "config.json").read_text()) for place in ("in", "out"))
    assert said["quantization_config"] == again["quantization_config"]
    P.save_pretrained(tmp_path / "sharded", config, kept, max_shard_size=9000)
    back = P.load_pretrained(tmp_path / "sharded", keep_quantized=True)[1]
    one, other = (tree.flatten(P.dequantize(each)) for each in (back, kept))
    assert one.keys() == other.keys() and all(torch.equal(leaf, other[path]) for path, leaf in one.items())


def test_rows_of_one_tensor_are_written_plain_together(tmp_path: Path) -> None:
    """Where one of them is plain, as after merging an adapter."""
    CHECKPOINTS["phi3 gptq"](tmp_path)
    config, kept = P.load_pretrained(tmp_path, keep_quantized=True, dtype=torch.float32)
    mlp = kept["layers"][0]["mlp"]
    assert isinstance(mlp["gate_proj"], KeptWeight) and isinstance(mlp["up_proj"], KeptWeight)
    mlp["gate_proj"] = mlp["gate_proj"].dequantized()
    P.save_pretrained(tmp_path / "out", config, kept)
    assert "model.layers.0.mlp.gate_up_proj.weight" in load_file(tmp_path / "out" / FILE)
    back = P.dequantize(P.load_pretrained(tmp_path / "out", keep_quantized=True, dtype=torch.float32)[1])
    one, other = tree.flatten(back), tree.flatten(P.dequantize(kept))
    assert one.keys() == other.keys() and all(torch.equal(leaf, other[path]) for path, leaf in one.items())


@pytest.mark.parametrize("name", [*EXPERTS, "mixtral bitsandbytes nf4", "mixtral bitsandbytes int8"])
def test_adapters_of_experts_train_on_a_kept_base(name: str, tmp_path: Path) -> None:
    """Their gradients and the merged model are those on the dequantized base."""
    CHECKPOINTS[name](tmp_path)
    config, plain, kept = both(tmp_path, dtype=torch.float32)
    experts = [leaf for path, leaf in by_path(kept).items() if ".experts." in path and path.endswith("_proj")]
    assert experts and all(isinstance(leaf, KeptWeight) for leaf in experts)
    batch = batch_of(config, segments((7, 5), (12,)))
    grads, merged = [], []
    for base in (plain, kept):
        tuned = P.lora.add(config, base, rank=2, targets=("o_proj", "layers.*.experts.*_proj"), seed=3)
        adapters = tree.map(lambda leaf: (leaf + 0.01).requires_grad_(), P.lora.adapters(tuned))
        attached = P.lora.attach(base, adapters)
        loss, leaves = batch.forward(attached).square().mean(), tree.leaves(adapters)
        grads.append(torch.autograd.grad(loss, leaves, materialize_grads=True))  # an MTP head takes no part
        merged.append(P.lora.merge(tree.map(torch.Tensor.detach, attached)))
    assert all(off(other, one) < 1e-5 for one, other in zip(*grads, strict=True))
    one, other = (tree.flatten(P.dequantize(params)) for params in merged)
    assert one.keys() == other.keys() and all(torch.equal(leaf, other[path]) for path, leaf in one.items())


@pytest.mark.parametrize("name", ["llama fp8", "gpt_oss mxfp4", "mixtral awq"])
def test_steps_train_adapters_alone(name: str, tmp_path: Path) -> None:
    """By the spec of the adapters: as on the plain base; the kept weights are what they were."""
    CHECKPOINTS[name](tmp_path)
    config, plain, kept = both(tmp_path, dtype=torch.float32)
    tokens = torch.arange(24).view(2, 12) % 23
    batch = {"tokens": tokens, "labels": tokens.roll(-1, 1), "segment_ids": torch.ones_like(tokens)}
    batch["positions"] = torch.arange(12).expand(2, -1)
    trained, losses = [], []
    for base in (plain, kept):
        adapted = P.lora.add(config, base, rank=2, targets=("q_proj", "layers.0.*.down_proj"), seed=4)
        optimizer = train.sgd(1e-2, spec=P.lora.spec(config, adapted))
        step = train.make_step(functools.partial(train.next_token_loss, config=config), optimizer)
        state = train.init_state(adapted, optimizer)
        for _ in range(3):
            state, metrics = step(state, batch)
        losses.append(metrics["loss"])
        trained.append(tree.leaves(P.lora.adapters(state.params)))
        if base is kept:
            now = [part for leaf in kept_leaves(state.params) for part in tree.leaves(leaf)]
            before = [part for leaf in kept_leaves(adapted) for part in tree.leaves(leaf)]
            assert all(torch.equal(one, other) for one, other in zip(now, before, strict=True))
    assert off(losses[1], losses[0]) < 1e-5
    assert all(off(other, one) < 1e-3 for one, other in zip(*trained, strict=True))


def test_transforms_of_a_kept_product(tmp_path: Path) -> None:
    """vmap over inputs, forward mode and second derivatives are those of the plain weight."""
    dialect = next(one for one in DIALECTS if one.name == "modelopt NVFP4")
    test_dialects.write(tmp_path, dialect)
    weight = test_dialects.up(P.load_pretrained(tmp_path, dtype=torch.float32, keep_quantized=True)[1])
    plain, x = weight.dequantized(), torch.randn(3, 5, 96, dtype=torch.float32)
    for each in (weight, plain):
        assert torch.func.vmap(lambda x, w=each: torch.nn.functional.linear(x, w))(x).shape == (3, 5, 64)

    def energy(w: Any) -> Any:
        return lambda x: torch.nn.functional.linear(x, w).pow(3).sum()

    for derivative in (torch.func.grad, lambda f: torch.func.vmap(torch.func.grad(f)), torch.func.hessian):
        value = x[0, 0] if derivative is torch.func.hessian else x
        assert off(derivative(energy(weight))(value), derivative(energy(plain))(value)) < 1e-5
    tangent = torch.randn(3, 5, 96)
    pairs = [torch.func.jvp(energy(w), (x,), (tangent,))[1] for w in (weight, plain)]
    assert off(*pairs) < 1e-5


def test_what_needs_plain_weights_says_so(tmp_path: Path) -> None:
    blocks.write(tmp_path, blocks.CONFIGS["llama"])
    _, kept = P.load_pretrained(tmp_path, keep_quantized=True)
    with pytest.raises(ValueError, match="check_finite=True needs kept weights in full"):
        P.load_pretrained(tmp_path, keep_quantized=True, plan={}, check_finite=True)
    with pytest.raises(TypeError, match="KeptWeight"):
        kept["layers"][0]["mlp"]["up_proj"] + 1


def test_kept_weights_take_the_memory_of_the_file(tmp_path: Path) -> None:
    """Of weights in the proportions of 7B: within a tenth of the file, where bf16 takes twice as much."""
    config = llama.Config(
        vocab_size=320,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=128,
    )
    blocks.write(tmp_path, config)
    _, plain, kept = both(tmp_path)
    leaves = sum(leaf.nbytes for leaf in tree.leaves(kept))
    assert leaves < 1.1 * (tmp_path / FILE).stat().st_size
    assert sum(leaf.nbytes for leaf in tree.leaves(plain)) > 1.8 * leaves


def test_check_finite_reads_kept_weights(tmp_path: Path) -> None:
    tensors = blocks.write(tmp_path, blocks.CONFIGS["llama"])
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name].view(torch.uint8)[0, 0] = 0x7F
    blocks.rewrite(tmp_path, tensors)
    P.load_pretrained(tmp_path, keep_quantized=True)
    with pytest.raises(P.MismatchError, match=f"{name} in .*: 1 of 60,000 values are not finite"):
        P.load_pretrained(tmp_path, keep_quantized=True, check_finite=True)
