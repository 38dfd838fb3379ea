"""`CausalLM`: a model as TRL's GRPOTrainer (1.16) takes one, an nn.Module with some methods of transformers' models.

    config, params = P.load_pretrained(folder, copy=True)
    model = train.integrations.trl.CausalLM(config, params, AutoConfig.from_pretrained(folder), GenerationConfig())
    GRPOTrainer(model, reward_funcs=reward, args=GRPOConfig(...), processing_class=tokenizer, ...).train()
    P.save_pretrained(out, config, model.params())

Answers are drawn by `train.generate`, with a cache and continuous batching. Nothing here imports trl or transformers.
One process trains: accelerate would shard modules, and these layers are functions. PEFT knows no layers here either.
"""

import dataclasses
from types import SimpleNamespace
from typing import Any, Unpack

import torch
from torch import Tensor

import fnmodels
from fnmodels.models.common.family import DecoderConfig, field_of
from fnmodels.module import ModelModule
from fnmodels.options import ForwardKwargs
from fnmodels.tree import Tree
from train.generation.loops import generate
from train.generation.sampling import Sampling
from train.remat import layer_fn


class CausalLM(ModelModule):
    """params, which are trained in place, with what TRL asks of a causal language model.

    hf_config, generation_config: transformers' objects for the checkpoint; TRL reads factors and token ids there.
    options: those of `fnmodels.forward`, for answers too. ValueError for a model whose head is not of tokens.
    """

    def __init__(
        self,
        config: DecoderConfig,
        params: Tree,
        hf_config: Any,
        generation_config: Any,
        **options: Unpack[ForwardKwargs],
    ) -> None:
        if (head := field_of(config, "head")) != "lm":
            raise ValueError(f"The model's head is {head!r}; TRL's trainers take a causal language model, with \"lm\".")
        super().__init__(config, params, options)
        self.config, self.generation_config, self._remat = hf_config, generation_config, "none"
        self._headless: Any = dataclasses.replace(config, head="none")  # its output is the normalized hidden states

    # TRL computes log-probabilities from these: the hidden states of `base_model` and the head's weight

    @property
    def base_model(self) -> Any:
        def run(input_ids: Tensor, attention_mask: Tensor | None = None, **more: Any) -> Any:
            return SimpleNamespace(last_hidden_state=self._run(self._headless, input_ids, attention_mask, **more))

        return run

    def get_output_embeddings(self) -> Any:
        name = "embed_tokens" if getattr(self._config, "tie_word_embeddings", False) else "lm_head"
        return SimpleNamespace(weight=self.get_parameter(name), bias=getattr(self, "lm_head_bias", None))

    def forward(  # type: ignore[override]  # the arguments of transformers
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **more: Any
    ) -> Any:
        """An object with logits [B, S, V]. attention_mask [B, S]: 0 for padding, on any side."""
        return SimpleNamespace(logits=self._run(self._config, input_ids, attention_mask, **more))

    def _run(self, config: Any, input_ids: Tensor, mask: Tensor | None = None, use_cache: Any = None) -> Tensor:
        valid = torch.ones_like(input_ids) if mask is None else mask.long()
        positions = (valid.cumsum(1) - 1).clamp(min=0)
        prepared = fnmodels.prepare(config, input_ids, positions=positions, segment_ids=valid)
        options = self._options.copy()
        if self.is_gradient_checkpointing:
            own: Any = options.get("layer_fn")
            recomputed: Any = layer_fn(self._remat, "none")
            options["layer_fn"] = recomputed if own is None else lambda block: recomputed(own(block))
        found: Tensor = fnmodels.forward(self.params(), *prepared, config=config, **options)
        return found

    @torch.no_grad()
    def generate(self, input_ids: Tensor, attention_mask: Tensor, generation_config: Any, **_: Any) -> Tensor:
        """[B, S + answer]: the prompts, padded on the left, and an answer to each, padded on the right."""
        prompts = [row[kept.bool()].tolist() for row, kept in zip(input_ids, attention_mask, strict=True)]
        ends = generation_config.eos_token_id
        found = generate(
            self.params(),
            self._config,
            prompts,
            max_new=generation_config.max_new_tokens,
            sampling=_sampling(generation_config),
            seeds=int(torch.randint(2**31, ())),  # by the seed that the trainer has set
            stop_ids=ends if isinstance(ends, list) else [] if ends is None else [ends],
            **self._options,
        ).tokens
        longest, pad = max(map(len, found)), generation_config.pad_token_id
        answers = input_ids.new_tensor([one + [pad] * (longest - len(one)) for one in found])
        return torch.cat((input_ids, answers), 1)

    # Methods that TRL calls besides

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = self.get_output_embeddings().weight.dtype
        return found

    def add_model_tags(self, tags: Any) -> None:
        """Nothing to do: they are for a model card on Hugging Face's hub."""

    @property
    def is_gradient_checkpointing(self) -> bool:
        return self._remat != "none"

    def gradient_checkpointing_enable(self, *_: Any, **__: Any) -> None:
        self._remat = "full"

    def gradient_checkpointing_disable(self) -> None:
        self._remat = "none"

    activation_checkpointing_enable = gradient_checkpointing_enable


def _sampling(given: Any) -> Sampling:
    """The Sampling of a GenerationConfig, where None is no restriction."""
    numbers = {name: value for name in ("temperature", "top_p", "min_p") if (value := getattr(given, name)) is not None}
    greedy = {} if given.do_sample else {"temperature": 0.0}
    return Sampling(**numbers | greedy, top_k=given.top_k or None, repetition=given.repetition_penalty or 1.0)
