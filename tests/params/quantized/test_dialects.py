"""The forms of quantized checkpoints: read to the bit, kept, trained on and written, or refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import params as P
from fnmodels import tree
from tests.params.quantized.dialects import DIALECTS, Dialect
from tests.params.quantized.test_published import CONFIG, UP
from tests.support.cases import batch_of, generic_params, segments

READ = tuple(dialect for dialect in DIALECTS if dialect.weight is not None)
REFUSED = tuple(dialect for dialect in DIALECTS if dialect.weight is None)


def write(folder: Path, dialect: Dialect) -> Tensor:
    """A checkpoint whose up projection is in the dialect; the weight that it stands for, in fp32."""
    P.save_pretrained(folder, CONFIG, generic_params(CONFIG, torch.bfloat16))
    parts, wanted = ({}, torch.empty(0)) if dialect.weight is None else dialect.weight()
    tensors = load_file(folder / "model.safetensors")
    if parts:
        tensors = {name: tensor for name, tensor in tensors.items() if UP not in name}
        tensors |= {f"{UP}.{ending}": tensor.contiguous() for ending, tensor in parts.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "fnmodels_manifest.json").unlink()
    if dialect.file:
        (folder / dialect.file).write_text(json.dumps(dialect.said))
        return wanted
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": dialect.said}))
    return wanted


def up(params: Any) -> Any:
    return params["layers"][0]["mlp"]["up_proj"]


@pytest.mark.parametrize("dialect", READ, ids=lambda each: each.name)
def test_dialect_read_kept_trained_and_written(dialect: Dialect, tmp_path: Path) -> None:
    wanted = write(tmp_path / "in", dialect)
    config, plain = P.load_pretrained(tmp_path / "in", dtype=torch.float32)
    assert config == CONFIG and torch.equal(up(plain), wanted)
    if not is_kept(dialect):
        return
    kept = P.load_pretrained(tmp_path / "in", dtype=torch.float32, keep_quantized=True)[1]
    assert torch.equal(up(kept).dequantized(), wanted)
    parts = [t for ending, t in load_file(tmp_path / "in" / "model.safetensors").items() if UP in ending]
    assert up(kept).nbytes <= sum(t.nbytes for t in parts)
    batch = batch_of(CONFIG, segments((7, 5), (12,)))
    assert torch.equal(batch.forward(kept), batch.forward(plain))
    assert_same_gradients(config, plain, kept, batch)
    P.save_pretrained(tmp_path / "out", config, P.dequantize(kept))
    assert torch.equal(up(P.load_pretrained(tmp_path / "out")[1]), wanted)
    P.save_pretrained(tmp_path / "same", config, kept)
    assert_same_file(tmp_path / "same", tmp_path / "in", dialect)
    assert_merged(config, kept, tmp_path / "merged")


def assert_same_file(folder: Path, origin: Path, dialect: Dialect) -> None:
    """Every tensor of the quantized weight has the bytes, dtype and shape of the file, which is declared alike."""
    read, written = (load_file(place / "model.safetensors") for place in (origin, folder))
    names = [name for name in read if UP in name]
    assert names and names == [name for name in written if UP in name]
    for name in names:
        assert read[name].dtype == written[name].dtype and read[name].shape == written[name].shape
        assert torch.equal(*(t[name].flatten().view(torch.uint8) for t in (read, written)))
    if dialect.file:
        assert json.loads((folder / dialect.file).read_text()) == dialect.said
    else:
        assert json.loads((folder / "config.json").read_text())["quantization_config"] == dialect.said
    assert P.verify(folder) is None


def assert_merged(config: Any, kept: Any, folder: Path) -> None:
    """Values that have not changed keep their codes; those of a merged adapter become the nearest that codes have."""
    again = P.requantize(P.dequantize(kept), kept)
    assert torch.equal(up(again).dequantized(), up(kept).dequantized())
    adapters = P.lora.adapters(P.lora.add(config, kept, rank=2, targets=("up_proj",), seed=1))
    size = float(up(kept).dequantized().std())
    merged = P.lora.merge(P.lora.attach(kept, tree.map(lambda leaf: leaf + 0.7 * size**0.5, adapters)))
    P.save_pretrained(folder, config, P.requantize(merged, kept))
    stored = up(P.load_pretrained(folder, dtype=torch.float32)[1])
    assert not torch.equal(stored, up(kept).dequantized()) and not torch.equal(stored, up(merged))
    far, before = ((one - up(merged)).abs() for one in (stored, up(kept).dequantized()))
    assert bool((far <= before * (1 + 1e-5) + 1e-6).all())


def is_kept(dialect: Dialect) -> bool:
    """Whether the file has a quantized weight at all."""
    return "alone" not in dialect.name or "cache" not in dialect.name


def assert_same_gradients(config: Any, plain: Any, kept: Any, batch: Any) -> None:
    """Those of adapters, on a kept base and on a plain one."""
    grads = []
    for base in (plain, kept):
        tuned = P.lora.add(config, base, rank=2, targets=("up_proj", "down_proj"), seed=1)
        adapters = P.lora.adapters(tuned)
        adapters = tree.map(lambda leaf: (leaf + 0.01).requires_grad_(), adapters)
        loss = batch.forward(P.lora.attach(base, adapters)).square().mean()
        grads.append(torch.autograd.grad(loss, tree.leaves(adapters)))
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


@pytest.mark.parametrize("dialect", REFUSED, ids=lambda each: each.name)
def test_dialect_refused_names_method_and_file(dialect: Dialect, tmp_path: Path) -> None:
    write(tmp_path, dialect)
    with pytest.raises(P.UnsupportedError, match=dialect.refused) as caught:
        P.load_pretrained(tmp_path)
    sentence = str(caught.value)
    assert "config.json, quantization_config" in sentence and "\n" not in sentence
    assert dialect.said.get("format", dialect.said["quant_method"]) in sentence or "sparse" in sentence
