"""`Quantization`: what a checkpoint says of how its weights are quantized, and where it says so.

Which tensors are quantized is determined from the files, not from lists of modules: a form applies wherever its tensors
are. It has no effect on the maths: weights are dequantized, and where a method quantizes activations or caches too,
they stay as they are computed, whatever the method. `activations` and `cache` say so.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fnmodels.errors import MismatchError
from params.io.safetensors_file import TensorEntry, TensorFile, read_tensor

from .form import Form

STATE_LIMIT = 1 << 16  # bytes of a tensor that describes a weight

# Endings of tensors about activations and caches, which weights do not need.
ACTIVATION_SCALES = (
    *(
        ".input_scale",
        ".activation_scale",
        ".qscale_act",
        "_activation_scale",
        ".input_global_scale",
        ".input_scale_ub",
    ),
    *(".input_zero_point", ".output_scale", ".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".prob_output_scale"),
)

Located = tuple[TensorFile, TensorEntry]


@dataclass(frozen=True)
class Declaration:
    """The declaration that a checkpoint is quantized: the JSON `text`, at this path of keys in config.json.

    file: that of another file that holds it, "" for config.json. beside: a JSON object of the fields of the config at
    `keys[:-1]` that say how weights are quantized too.
    """

    text: str
    keys: tuple[str, ...] = ()
    file: str = ""
    beside: str = "{}"


UNDECLARED = Declaration("{}")


@dataclass(frozen=True)
class Described:
    """One weight as a file describes it: its form, [out, in], and the values of parts that are numbers of its own.

    shape None: that of the codes.
    """

    form: Form
    shape: tuple[int, int] | None = None
    numbers: tuple[tuple[str, float], ...] = ()


def shape_of(form: Form, state: Tensor) -> Described:
    """A form whose weights have a tensor with their shape, [out, in]."""
    if state.dtype not in (torch.int32, torch.int64) or state.numel() != 2 or not bool((state > 0).all()):
        raise MismatchError("must be the two sizes of the weight")
    out, width = state.flatten().tolist()
    return Described(form, (out, width))


@dataclass(frozen=True)
class Quantization:
    """The quantization of the weights in a checkpoint's files.

    method: its name in the file that says so. forms: any of which a tensor may have. modules: those of some modules, by
    their full names in the files. describe: reads a form's state, (form, [out, in]). ignored: endings of tensors that
    weights do not need. activations, cache: how the method quantizes them, "" for not at all. dtype: of weights whose
    scales have none of their own. declaration: where it was read.
    """

    method: str
    forms: tuple[Form, ...]
    modules: Mapping[str, tuple[Form, ...]] = field(default_factory=dict)
    describe: Callable[[Form, Tensor], Described] = shape_of
    ignored: tuple[str, ...] = ACTIVATION_SCALES
    activations: str = ""
    cache: str = ""
    dtype: torch.dtype = torch.bfloat16
    declaration: Declaration = UNDECLARED

    def candidates(self, name: str, found: Mapping[str, Located], buffer: Tensor) -> Iterator[Described]:
        """The forms that the tensor `name` may be the codes of, with what a tensor says of the weight.

        MismatchError for a description that is none.
        """
        dtype = found[name][1].dtype
        forms = self.modules.get(name.rpartition(".")[0], self.forms) if self.modules else self.forms
        for form in forms:
            if not name.endswith(form.codes.ending) or not re.search(form.only, name):
                continue
            if dtype not in form.codes.dtypes and form.codes.ending == form.weight:  # a weight that is not quantized
                continue
            state = name.removesuffix(form.codes.ending) + form.state
            if not form.state or state not in found:
                yield Described(form)
                continue
            file, entry = found[state]
            try:
                if entry.stop - entry.start > STATE_LIMIT:
                    raise MismatchError(f"has {entry.stop - entry.start:,} bytes, too many for a description")
                yield self.describe(form, read_tensor(file, entry, None, buffer))
            except MismatchError as error:
                raise MismatchError(f"{file.path}: {state!r} {error}.") from None

    @functools.cached_property
    def endings(self) -> frozenset[str]:
        """Endings of the names of all parts that a weight may have, but for codes that have the weight's name."""
        every = {form for forms in (self.forms, *self.modules.values()) for form in forms}
        named = {part.ending for form in every for part, _, _ in form.parts()}
        return frozenset(named.union(*(form.descriptions for form in every)) - {""})

    @functools.cached_property
    def code_endings(self) -> frozenset[str]:
        """Endings of the names of tensors of codes."""
        return frozenset(form.codes.ending for forms in (self.forms, *self.modules.values()) for form in forms)

    @functools.cached_property
    def _beside_codes(self) -> tuple[str, ...]:
        return tuple(self.endings - self.code_endings)

    def is_beside_codes(self, name: str, found: Mapping[str, Located]) -> bool:
        """Whether it is a part or description of a weight whose codes are another tensor."""
        if not name.endswith(self._beside_codes):
            return False
        stems = [name.removesuffix(ending) for ending in self._beside_codes if name.endswith(ending)]
        return any(stem + codes != name and stem + codes in found for stem in stems for codes in self.code_endings)

    @property
    def summary(self) -> str:
        """The method, and what it quantizes that is not quantized here."""
        also = [f"{what} ({how})" for what, how in (("activations", self.activations), ("caches", self.cache)) if how]
        return self.method + (f"; it quantizes {' and '.join(also)} too, which are exact here" if also else "")


def declared_dtype(values: Mapping[str, Any]) -> torch.dtype:
    """The half-precision dtype that config.json names, else bf16."""
    text = values.get("text_config")
    for section in (values, text if isinstance(text, Mapping) else {}):
        for name in ("dtype", "torch_dtype"):
            if section.get(name) in ("float16", "bfloat16"):
                dtype: torch.dtype = getattr(torch, section[name])
                return dtype
    return torch.bfloat16
