"""transformers as the reference: tiny fp32 models with generic parameters, eager attention and experts, no cache."""

import copy
import functools
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, Mistral4Config, Mistral4ForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.initialization import no_init_weights
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

import fnmodels
from fnmodels import tree
from fnmodels.models.common import storage
from fnmodels.models.common.family import field_of
from tests.support import text_models
from tests.support.cases import collected, generic, variants_of

# transformers 5.23 lists it among models with vision only
AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)
text_models.register()
# transformers 5.24 reads it in Llama 4's wrapper and has it in no output of a text model
if not hasattr(MoeCausalLMOutputWithPast, "image_outputs"):
    MoeCausalLMOutputWithPast.image_outputs = None
_SETTINGS = GenerationConfig()
EAGER: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}


def model_of(values: dict[str, Any]) -> torch.nn.Module:
    """A fresh model of a config.json's content, every parameter and buffer of its checkpoint generic.

    The same values give the same numbers.
    """
    config = AutoConfig.for_model(**reference_values(values))
    config.use_cache = False
    # Every weight is overwritten, and the settings of generation, a sixth of the time, are arguments of `generate`.
    with no_init_weights(), patch.object(GenerationConfig, "from_model_config", lambda config: _SETTINGS):
        model = _class_of(config).eval()
    model.tie_weights()
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "create_weight"):  # of sines and cosines
                module.weight.copy_(module.create_weight())
        for name, tensor in _of_checkpoint(model).items():
            absent = collected("ABSENT").get(values["model_type"])
            tensor.copy_(torch.zeros_like(tensor) if absent and name.endswith(absent) else generic(name, tensor))
    return model


def _class_of(config: Any) -> Any:
    """A fresh fp32 model: of the class that an encoder's config names, else the causal one of its model type."""
    named = auto_class(config)
    if named is AutoModelForCausalLM:
        # Falcon's eager attention adds its linear biases twice, in the mask and to the scores
        how = EAGER | {"attn_implementation": "sdpa"} if getattr(config, "alibi", False) else EAGER
        return named.from_config(config, **how, dtype=torch.float32)
    return named._from_config(config, attn_implementation="eager", dtype=torch.float32)


def auto_class(config: Any) -> Any:
    """The class that an encoder's config names, else AutoModelForCausalLM."""
    named = getattr(transformers, (config.architectures or [""])[0], None)
    decodes = named is None or named.__name__.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))
    return AutoModelForCausalLM if decodes else named


def reference_values(values: dict[str, Any]) -> dict[str, Any]:
    """The config.json as transformers knows the model: see STANDS_FOR of a family's variants.

    A copy: transformers writes into the objects inside of what it is given.
    """
    model_type = values["model_type"]
    return copy.deepcopy(values) | {"model_type": collected("STANDS_FOR").get(model_type, model_type)}


def _of_checkpoint(model: torch.nn.Module) -> dict[str, Tensor]:
    """The parameters, a tied one once, and the buffers that are saved with them (biases of a router's choice)."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = {name: tensor for name, tensor in model.state_dict().items() if name not in parameters}
    once = {name: tensor for name, tensor in parameters.items() if name not in model.all_tied_weights_keys}
    left_out = collected("LEFT_OUT").get(model.config.model_type, ())
    return {name: tensor for name, tensor in (once | buffers).items() if not name.endswith(left_out)}


def on_disk(model: torch.nn.Module) -> dict[str, Any]:
    """The tensors of the model's checkpoint by their published names. A tied head is listed once."""
    state = dict(revert_weight_conversion(model, _of_checkpoint(model)))
    mend = _mend(model.config.model_type)
    return mend(state, model.config) if mend else state


def save(model: torch.nn.Module, folder: Path, **options: Any) -> None:
    """The model's checkpoint folder with the published names; options: of transformers' `save_pretrained`."""
    state = {"state_dict": on_disk(model), "save_original_format": False} if _mend(model.config.model_type) else {}
    model.save_pretrained(folder, **state, **options)


@functools.cache
def _mend(model_type: str) -> Any:
    """`as_published` of the family's variants."""
    family = fnmodels.families().get(model_type, "").rpartition(".")[2]
    return getattr(variants_of(family), "as_published", None) if family else None


def params_of(model: torch.nn.Module, config: Any) -> Any:
    """The model's parameters as our tree, moved by name and by nothing else: no tensor may be left over."""
    state = on_disk(model)
    stored = fnmodels.family_of(config).hf_names(config)
    assert {name for s in stored.values() for name in storage.disk_names(s)} == state.keys()
    flat = {path: storage.extract_parameter(s, state).detach().clone() for path, s in stored.items()}
    return tree.unflatten(flat)


def logits_of(
    values: dict[str, Any], tokens: Tensor, positions: Tensor | None = None, valid: Tensor | None = None
) -> Tensor:
    """The reference's logits [B, S, V], from a fresh model where its rope remembers earlier calls.

    Without `valid`, documents are separated by positions that restart, which works only without cache and mask.
    """
    with torch.no_grad():
        mask = None if valid is None else valid.long()
        where = None if positions is None else position_ids(values, positions)
        model = shared_model(values)
        return model(input_ids=tokens, position_ids=where, attention_mask=mask, use_cache=False).logits


def shared_model(values: dict[str, Any]) -> Any:
    """`model_of` to be read only; the last few are kept, but for those whose rope remembers earlier calls."""
    text = json.dumps(values, sort_keys=True, default=repr)
    remembers = '"dynamic"' in text or '"longrope"' in text
    return model_of(values) if remembers else _kept(text, _Values(values))


class _Values:
    """A config.json as an argument that no cache looks at."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Values)

    def __hash__(self) -> int:
        return 0


@functools.lru_cache(maxsize=2)
def _kept(text: str, of: _Values) -> torch.nn.Module:
    """The model of a config.json with this text, read-only."""
    return model_of(of.values)


def position_ids(values: dict[str, Any], positions: Tensor) -> Tensor:
    """What the reference takes for positions that begin with 0: RoBERTa's are rows of its table."""
    config = fnmodels.family_for(values["model_type"]).Config.from_hf(values)
    return positions + field_of(config, "first_position")


def assert_close(ours: Tensor, theirs: Tensor, *, bound: float = 2e-5) -> None:
    """max |difference| <= bound x max(1, std): about 5 to 10 times the reference's own noise (eager against fused)."""
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    std = float(theirs.std())
    assert torch.isfinite(ours).all() and std > 0.1, "nothing is compared"
    worst = float((ours - theirs).abs().max())
    assert worst <= bound * max(1.0, std), f"off by {worst:.2e} at std {std:.2f}"
