"""gpt-oss checkpoints as published, with experts in mxfp4: dequantized as in transformers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import fnmodels
import params as P
from fnmodels import gpt_oss, tree
from tests.support.cases import Case, forward, generic_params, tokens_of
from tests.support.oracle import assert_close
from tests.variants import gpt_oss as variants

VALUES = variants.TINY | {"hidden_size": 64, "intermediate_size": 32}  # multiples of the block size 32
CASE = Case("gpt_oss", "gpt_oss_mxfp4", VALUES, gpt_oss.Config.from_hf(VALUES))
FILE = "model.safetensors"


def _quantized(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint in OpenAI's format."""
    P.save_pretrained(folder, CASE.config, generic_params(CASE.config, torch.bfloat16))
    tensors = load_file(folder / FILE)
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, width, out = tensors.pop(name).shape
        shape = (experts, out, width // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(122, 126, shape, generator=generator, dtype=torch.uint8)
    save_file(tensors, folder / FILE)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


@pytest.mark.parametrize("case", [CASE], ids=str)
def test_mxfp4(case: Case, tmp_path: Path) -> None:
    tensors = _quantized(tmp_path / "mxfp4")
    config, weights = P.load_pretrained(tmp_path / "mxfp4")
    assert config == case.config
    P.save_pretrained(tmp_path / "bf16", config, weights)
    back = load_file(tmp_path / "bf16" / FILE)
    assert back.keys() == {name.removesuffix("_blocks").removesuffix("_scales") for name in tensors}
    for name, tensor in back.items():
        theirs = tensors.get(name)
        if theirs is None:
            theirs = convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
        assert tensor.dtype == theirs.dtype == torch.bfloat16 and torch.equal(tensor, theirs), name
    assert "quantization_config" not in json.loads((tmp_path / "bf16" / "config.json").read_text())
    assert all(leaf.is_contiguous() for leaf in tree.leaves(weights["layers"][0]["mlp"]["experts"]))

    _, wide = P.load_pretrained(tmp_path / "mxfp4", dtype=torch.float32)
    tokens = tokens_of(config, 2, 24)
    ours = forward(wide, fnmodels.prepare(config, tokens), config=config, kernel="math")
    P.save_pretrained(tmp_path / "fp32", config, wide)
    again = P.load_pretrained(tmp_path / "bf16", dtype=torch.float32)[1]
    assert all(torch.equal(leaf, tree.flatten(again)[path]) for path, leaf in tree.flatten(wide).items())
    assert_close(ours, logits_of_folder(tmp_path / "fp32", tokens))


def logits_of_folder(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, **eager).eval()(tokens, use_cache=False).logits
