"""Causal language models of texts that transformers has inside of models of images alone: for AutoModelForCausalLM."""

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationMixin
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.glm5_next import configuration_glm5_next, modeling_glm5_next
from transformers.models.hy_v4_vl import configuration_hy_v4_vl, modeling_hy_v4_vl
from transformers.models.mistral_large4 import configuration_mistral_large4, modeling_mistral_large4
from transformers.models.muse_glimmer import configuration_muse_glimmer, modeling_muse_glimmer
from transformers.models.muse_spark import configuration_muse_spark, modeling_muse_spark
from transformers.models.step3p7 import configuration_step3p7, modeling_step3p7


class MuseGlimmerForCausalLM(modeling_muse_glimmer.MuseGlimmerPreTrainedModel, GenerationMixin):
    """Muse Glimmer's text with the head of the whole model."""

    config_class = configuration_muse_glimmer.MuseGlimmerTextConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = modeling_muse_glimmer.MuseGlimmerTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Any = None, labels: Any = None, **how: Any) -> CausalLMOutputWithPast:
        keep = how.pop("logits_to_keep", 0)
        out = self.model(input_ids=input_ids, **how)
        logits = self.lm_head(out.last_hidden_state[:, -keep:] if keep else out.last_hidden_state)
        cap = self.config.final_logit_softcapping
        logits = cap * (logits * self.config.output_multiplier / cap).tanh()
        size = self.config.vocab_size
        loss = None if labels is None else self.loss_function(logits=logits, labels=labels, vocab_size=size)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=None, hidden_states=out.hidden_states)


class MuseSparkForCausalLM(modeling_muse_spark.MuseSparkPreTrainedModel, GenerationMixin):
    """Muse Spark's text with the head of the whole model."""

    config_class = configuration_muse_spark.MuseSparkTextConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = modeling_muse_spark.MuseSparkTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    forward = MuseGlimmerForCausalLM.forward


class MistralLarge4ForCausalLM(modeling_mistral_large4.MistralLarge4PreTrainedModel, GenerationMixin):
    """Mistral Large 4's text with the head of the whole model."""

    config_class = configuration_mistral_large4.MistralLarge4TextConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = modeling_mistral_large4.MistralLarge4TextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Any = None, labels: Any = None, **how: Any) -> CausalLMOutputWithPast:
        keep = how.pop("logits_to_keep", 0)
        out = self.model(input_ids=input_ids, **how)
        logits = self.lm_head(out.last_hidden_state[:, -keep:] if keep else out.last_hidden_state)
        cap, size = self.config.final_logit_softcapping, self.config.vocab_size
        logits = cap * (logits / cap).tanh()
        loss = None if labels is None else self.loss_function(logits=logits, labels=labels, vocab_size=size)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=None, hidden_states=out.hidden_states)


class Step3p5ForCausalLM(modeling_step3p7.Step3p7PreTrainedModel, GenerationMixin):
    """Step 3.7's text with the head of the whole model, which Step 3.5 is."""

    config_class = configuration_step3p7.Step3p7TextConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = modeling_step3p7.Step3p7TextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Any = None, labels: Any = None, **how: Any) -> CausalLMOutputWithPast:
        keep = how.pop("logits_to_keep", 0)
        out = self.model(input_ids=input_ids, **how)
        logits = self.lm_head(out.last_hidden_state[:, -keep:] if keep else out.last_hidden_state)
        size = self.config.vocab_size
        loss = None if labels is None else self.loss_function(logits=logits, labels=labels, vocab_size=size)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=None, hidden_states=out.hidden_states)


class Glm5NextForCausalLM(modeling_glm5_next.Glm5NextPreTrainedModel, GenerationMixin):
    """GLM 5.3 Flash's text with the head of the whole model."""

    config_class = configuration_glm5_next.Glm5NextTextConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = modeling_glm5_next.Glm5NextTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Any = None, labels: Any = None, **how: Any) -> CausalLMOutputWithPast:
        keep = how.pop("logits_to_keep", 0)
        out = self.model(input_ids=input_ids, **how)
        logits = self.lm_head(out.last_hidden_state[:, -keep:] if keep else out.last_hidden_state)
        size = self.config.vocab_size
        loss = None if labels is None else self.loss_function(logits=logits, labels=labels, vocab_size=size)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=None, hidden_states=out.hidden_states)


class HYV4VLForCausalLM(modeling_hy_v4_vl.HYV4VLPreTrainedModel, GenerationMixin):
    """The text of Hy4 with images, with the head of the whole model."""

    config_class = configuration_hy_v4_vl.HYV4VLTextConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _keep_in_fp32_modules_strict = ["lm_head"]  # noqa: RUF012

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = modeling_hy_v4_vl.HYV4VLTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=torch.float32)
        self.post_init()

    def forward(self, input_ids: Any = None, labels: Any = None, **how: Any) -> CausalLMOutputWithPast:
        keep = how.pop("logits_to_keep", 0)
        if (places := how.get("position_ids")) is not None:  # the first of four axes tells documents apart
            how["position_ids"] = places.expand(4, *places.shape)
        out = self.model(input_ids=input_ids, **how)
        x = out.last_hidden_state[:, -keep:] if keep else out.last_hidden_state
        logits, size = self.lm_head(x.to(self.lm_head.weight.dtype)), self.config.vocab_size
        loss = None if labels is None else self.loss_function(logits=logits, labels=labels, vocab_size=size)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=None, hidden_states=out.hidden_states)


def register() -> None:
    """Makes `AutoModelForCausalLM` know them, and transformers the names in files of Step 3.5 and Mistral Large 4."""
    muse: tuple[Any, ...] = (MuseGlimmerForCausalLM, MuseSparkForCausalLM)
    for model in (*muse, Step3p5ForCausalLM, MistralLarge4ForCausalLM, Glm5NextForCausalLM, HYV4VLForCausalLM):
        AutoModelForCausalLM.register(model.config_class, model, exist_ok=True)
    names = get_checkpoint_conversion_mapping("step3p7")
    of_layers = [one for one in names if not one.source_patterns[0].startswith("^")]  # without prefixes of the wrapper
    register_checkpoint_conversion_mapping("Step3p5ForCausalLM", of_layers, overwrite=True)
    ends = {"tok_embeddings": "model.embed_tokens", "layers": "model.layers", "norm": "model.norm", "output": "lm_head"}
    first = [WeightRenaming(rf"^{theirs}\.", f"{ours}.") for theirs, ours in ends.items()]
    first.append(WeightRenaming(r"^lerope\.alpha", "model.rotary_emb.alpha"))
    outer = get_checkpoint_conversion_mapping("mistral_large4")
    common = [one for one in outer if not one.source_patterns[0].startswith(("^", "attention"))]
    # beside those of the text model in it
    register_checkpoint_conversion_mapping("MistralLarge4ForCausalLM", [*first, *common], overwrite=True)
