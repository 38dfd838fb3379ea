"""The model of benchmarks/research.py in fnmodels and in transformers, with the same weights and inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import fnmodels
import params as P
from fnmodels import llama, tree

FULL = llama.Config(
    vocab_size=8192,
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=4,
    rms_norm_eps=1e-5,
)
QUICK = replace(FULL, vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, layer_kinds=())
Contender = Callable[[], list[Tensor]]
Contenders = dict[str, Contender]  # "fnmodels" and the others


class Setting:
    """One model in both libraries, and inputs for it."""

    def __init__(self, config: Any, rows: int, length: int) -> None:
        self.config, self.params, self.names = config, P.init(config, 0), llama.hf_names(config)
        values = {name: value for name, value in config.to_hf().items() if name != "architectures"}
        settings = transformers.LlamaConfig(**values)
        settings._attn_implementation = "eager"
        self.model = transformers.LlamaForCausalLM(settings).eval()
        flat = {self.names[path]: leaf for path, leaf in tree.flatten(self.params).items()}
        self.model.load_state_dict(flat, strict=True)
        self.leaves = dict(self.model.named_parameters())
        self.generator = torch.Generator().manual_seed(0)
        self.tokens = self.draw(rows, length)
        self.labels = self.tokens.roll(-1, 1)
        self.prepared = fnmodels.prepare(config, self.tokens)

    def draw(self, *shape: int) -> Tensor:
        return torch.randint(self.config.vocab_size, shape, generator=self.generator)

    def loss(self, params: Any, batch: Any) -> Tensor:
        prepared, labels = batch
        return summed(fnmodels.forward(params, *prepared, config=self.config, kernel="math"), labels)

    def run(self, tokens: Tensor, **more: Any) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens, use_cache=False, **more).logits
        return logits

    def ordered(self, tree_: Any) -> list[Tensor]:
        """The leaves in the order of transformers' parameters."""
        flat = {self.names[path]: leaf for path, leaf in tree.flatten(tree_).items()}
        return [flat[name] for name in self.leaves]


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")


def opacus_module(model: Any) -> Any:
    """A Llama of transformers that computes a gradient for each sample, for losses that are sums."""
    from opacus.grad_sample import GradSampleModule, register_grad_sampler
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    # Without a sampler of its own Opacus would run the norms through torch.func, which is slower.
    @register_grad_sampler(LlamaRMSNorm)
    def norm_sampler(layer: Any, inputs: list[Tensor], grad_outputs: Tensor) -> dict[Any, Tensor]:
        normed = F.rms_norm(inputs[0], inputs[0].shape[-1:], None, layer.variance_epsilon)
        return {layer.weight: torch.einsum("bsd,bsd->bd", normed, grad_outputs)}

    return GradSampleModule(model, batch_first=True, loss_reduction="sum")
