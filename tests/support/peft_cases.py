"""Every model that transformers has too, as PEFT sees it: decoders, encoders, towers, readers of images, pairs."""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fnmodels
from fnmodels import tree
from fnmodels.models.common import storage
from fnmodels.models.common.storage import StoredNames
from fnmodels.tree import Tree
from params import lora
from params.checkpoint.module_names import module_names
from params.lora.leaves import params_by_path
from tests.fnmodels.models import (
    test_blip,
    test_glmasr,
    test_granite_speech,
    test_mllama,
    test_moonshine,
    test_pairs,
    test_qwen2_audio,
    test_qwen3_asr,
    test_vision,
    test_voxtral_realtime,
    test_wav2vec2,
    test_whisper,
)
from tests.support.cases import Case, cases, collected, structure
from tests.support.image_texts import image_cases, image_cases_of_all_names
from tests.support.naming import covering_names, pairs_of
from tests.support.oracle import params_of, shared_model

# transformers concatenates these in memory
_MESSAGES = tuple(f"messages.{name}" for name in ("q", "k", "v", "mlp"))  # in a tensor of three dimensions
CONCATENATED = _MESSAGES


@dataclass(frozen=True, eq=False)
class PeftCase:
    """A model of transformers with generic parameters, its Config and how our parameters are made of it."""

    name: str
    config: Any
    model: Callable[[], Any]
    params: Callable[[], Tree]
    values: Any = None

    def __str__(self) -> str:
        return self.name

    def fresh(self, dtype: torch.dtype = torch.float64) -> Any:
        """A copy of the model, whose parameters may be written."""
        return copy.deepcopy(self.model()).to(dtype)

    def base(self, dtype: torch.dtype = torch.float64) -> Tree:
        return tree.map(lambda t: t.to(dtype) if t.is_floating_point() else t, self.params())


@functools.cache
def peft_cases() -> tuple[PeftCase, ...]:
    """The first variant of each structure and names of decoders and encoders, and every tower, reader and pair."""
    first: dict[Any, Case] = {}
    for case in cases():
        # The modules of EXAONE 3 are those of its own code, and not of Llama, with which it is compared.
        own_code = case.name in collected("UNREADABLE") or case.config.model_type == "exaone"
        if case.values is not None and not own_code:
            first.setdefault((structure(case), frozenset(pairs_of(module_names(case.config)))), case)
    found = [decoder_case(case) for case in first.values()]
    images = image_cases_of_all_names()
    for case in image_cases(every=True):  # one at least of each family
        if not families_in(case.config) <= set[str]().union(*(families_in(each.config) for each in images)):
            images.append(case)
    found += [PeftCase(f"image_{c}", c.config, c.reference, c.params) for c in images]
    for name in test_vision.EVERY:
        made = functools.partial(test_vision._reference, name), functools.partial(test_vision._params, name)
        found.append(PeftCase(f"tower_{name}", test_vision._config(name), *made))
    for name in ("t5", "t5_v1_1", "t5_encoder", "umt5", "t5gemma", "bart", "m2m_100"):
        made = functools.partial(test_pairs.reference, name), functools.partial(test_pairs.params_of, name)
        found.append(PeftCase(name, test_pairs.config_of(name), *made))
    for tests in (test_blip, test_mllama, test_glmasr, test_voxtral_realtime, test_qwen3_asr):
        found.append(PeftCase(tests.VALUES["model_type"], tests.CONFIG, tests._reference, tests._params))
    for tests in (test_qwen2_audio, test_granite_speech, test_wav2vec2):
        variants = []
        for name, values in tests.VARIANTS.items():
            made = functools.partial(tests._reference, name), functools.partial(tests._params, name)
            config = fnmodels.family_for(values["model_type"]).Config.from_hf(values)
            variants.append(PeftCase(f"{tests.__name__.rpartition('.test_')[2]}_{name}", config, *made))
        found += covering_names(variants, lambda case: module_names(case.config))
    found.append(PeftCase("moonshine", test_moonshine.config_of(), test_moonshine.reference, test_moonshine.weights))
    return (*found, PeftCase("whisper", test_whisper.CONFIG, test_whisper.reference, test_whisper.weights))


def families_in(config: Any) -> set[str]:
    """The families of a model and of its parts."""
    name = type(config).__module__
    parts = [value for value in vars(config).values() if type(value).__module__.startswith("fnmodels.models.")]
    parts = [part for part in parts if hasattr(part, "model_type")]
    return {name}.union(*map(families_in, parts))


def decoder_case(case: Case) -> PeftCase:
    """A decoder or encoder by its config.json."""
    model = functools.partial(shared_model, case.values)
    made = functools.cache(lambda: params_of(model(), case.config))
    return PeftCase(case.name, case.config, model, made, case.values)


def in_memory(model: Any) -> dict[str, Tensor]:
    """Parameters and buffers by their names, a tied one by each."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())


def compared_names(config: Any) -> StoredNames:
    """{path of a parameter: its name in memory}, but of those that are there in another form."""
    return {path: stored for path, stored in module_names(config).items() if not path.endswith(CONCATENATED)}


def weights_by_path(config: Any, model: Any) -> dict[str, Tensor]:
    """{path: values} of our parameters in a model of transformers."""
    held, names = in_memory(model), compared_names(config)
    return {path: storage.extract_parameter(stored, held).detach() for path, stored in names.items()}


def merged_by_path(params: Tree) -> dict[str, Tensor]:
    """{path: values} of params with adapters merged, but of embeddings whose two uses differ."""
    flat = params_by_path(params)
    return params_by_path(lora.merge({path: leaf for path, leaf in flat.items() if not isinstance(leaf, lora.TwoUses)}))


def worst(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> tuple[float, str]:
    """(the largest difference, relative to the largest value of its parameter, and its path)."""
    assert ours.keys() >= theirs.keys() - {p for p in theirs if p not in ours and p.endswith("embed_tokens")}
    off = {
        path: float((ours[path] - value).abs().max() / value.abs().max().clamp(min=1e-3))
        for path, value in theirs.items()
        if path in ours
    }
    path = max(off, key=lambda each: off[each])
    return off[path], path


def linear_modules(model: Any) -> list[str]:
    """The names of the modules that PEFT adapts as linear maps; within nn.MultiheadAttention it does so in vain."""
    found = dict(model.named_modules())
    kinds = (torch.nn.Linear,)
    return [
        name
        for name, module in found.items()
        if (isinstance(module, kinds) or type(module).__name__ == "Conv1D")
        and not isinstance(found[name.rpartition(".")[0]], torch.nn.MultiheadAttention)
    ]
