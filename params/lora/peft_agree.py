"""Whether the tensors of a file of adapters are those that its adapter_config.json names, as PEFT would read them."""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fnmodels.models.common.family import traits_of
from fnmodels.models.common.registry import family_of

from .adapter_config import AdapterConfig, Selection, is_slow
from .peft_modules import PREFIX, Layout, Modules, Place

# The number of a layer in a module's name, as newer and older releases of PEFT find it: they differ in experts.
_NUMBERED = re.compile(r"(?:^|.*?\.)[^.]*[^.\d][^.]*\.(\d+)\.")  # the first number
_LAYER = (re.compile(r".*?\.[^.]*\.(\d+)\."), re.compile(r".*\.[^.]*\.(\d+)\."))


@dataclass
class Contents:
    """The adapters and parameters in a file.

    names: of each module with an adapter {name here: name in the file}. parameters: the names of those that
    target_parameters name. paths: of all parameters with an adapter. full: of those that are there in full. rows: the
    modules with trained rows of tokens.
    """

    names: dict[str, str] = field(default_factory=dict)
    parameters: set[str] = field(default_factory=set)
    paths: set[str] = field(default_factory=set)
    full: set[str] = field(default_factory=set)
    rows: set[str] = field(default_factory=set)


def selects(selection: Selection, module: str) -> bool | None:
    """Whether the fields put an adapter on a module of this name; None: they do not say, or by a slow expression."""
    if _is_excluded(selection, module):
        return False
    if any(name == module or f".{name}." in f".{module}." for name in selection.saved):
        return False
    if selection.expression:
        return None if is_slow(selection.expression) else _matches(selection.expression, module)
    if selection.modules is None:
        return None
    if module in selection.modules:
        return True
    return _ends(module, selection.modules) and _layer_is_named(selection, module)


def _is_excluded(selection: Selection, module: str) -> bool:
    return _ends(module, selection.excluded) or _matches(selection.excluded_expression, module)


def _layer_is_named(selection: Selection, module: str) -> bool:
    if not selection.layers:
        return True
    if selection.patterns:
        matches = [re.match(rf"(?:^|.*?\.){re.escape(name)}\.(\d+)\.", module) for name in selection.patterns]
    else:
        matches = [pattern.match(module) for pattern in _LAYER]
    return any(match is not None and int(match[1]) in selection.layers for match in matches)


def _ends(name: str, ends: Iterable[str]) -> bool:
    """Whether a name is one of `ends`, or ends with one of them behind a dot."""
    return f".{name}".endswith(tuple(f".{end}" for end in ends))


def _matches(expression: str, module: str) -> bool:
    return bool(expression) and not is_slow(expression) and re.fullmatch(expression, module) is not None


def disagreements(config: Any, settings: AdapterConfig, layout: Layout, contents: Contents) -> list[str]:
    """Faults: tensors of the file that the fields exclude, and tensors that they name and the file lacks."""
    selection = settings.selection
    faults = [
        f"{PREFIX}{name}: it has an adapter, which target_modules, exclude_modules, layers_to_transform or "
        "modules_to_save exclude"
        for name, written in contents.names.items()
        if not _named(settings, name)
        and all(selects(selection, form) is False for form in (name, written, *_tied_modules(layout, name)))
    ]
    optional = tuple(f"{part}." for part in traits_of(family_of(config)).optional)  # transformers does not load these
    forms = [layout.memory, layout.files] if _has_experts(layout, contents) else [layout.memory]

    def missing(field: str, names: Callable[[Modules], Mapping[str, list[Place]]], has: Callable[[str], bool]) -> None:
        for form in forms if field == "target_modules" else [layout.memory]:
            for name, places in names(form).items():
                paths = [place.path for place in places if not place.path.startswith(optional)]
                if any(not has(path) for path in paths):
                    faults.append(f"{PREFIX}{name}: missing, {field} names it")

    faults += list(_unmatched(settings, layout))
    _warn_of_unused(settings, layout, contents)
    missing("target_modules", lambda form: _chosen(form.linear, selection), contents.paths.__contains__)
    missing("target_parameters", lambda form: _parameters(form, settings.parameters), contents.paths.__contains__)
    missing("modules_to_save", lambda form: _saved(form.tensors, selection), _either(layout, contents.full))
    missing("bias", lambda form: _biases(form, settings.bias, contents), _either(layout, contents.full))
    tied = layout.tied is not None and bool(contents.rows)  # PEFT saves the rows of both uses once
    for name, ids in settings.token_rows if not tied else ():
        if ids and not any(not name or _ends(module, [name]) for module in contents.rows):
            faults.append(f"{PREFIX}{name or 'embed_tokens'}: rows are missing, trainable_token_indices names them")
    return faults


def _unmatched(settings: AdapterConfig, layout: Layout) -> Iterator[str]:
    """Faults: entries of target_parameters and layers_to_transform that nothing in the model has.

    Names in target_modules and modules_to_save may be of other models, as lists of modules by task are.
    """
    for end in settings.parameters:
        if not any(_parameters(form, (end,)) for form in (layout.memory, layout.files)):
            yield f"target_parameters has {end!r}, which names no parameter of the model that takes an adapter"
    selection = settings.selection
    patterns = [re.compile(rf"(?:^|.*?\.){re.escape(name)}\.(\d+)\.") for name in selection.patterns] or [_NUMBERED]
    names = [*layout.memory.tensors, *layout.files.tensors]
    found = {int(match[1]) for name in names for pattern in patterns if (match := pattern.match(name))}
    for layer in selection.layers if settings.selection.modules else ():
        if layer not in found:
            known = f"its layers are 0 to {max(found)}" if found else "no module lies in a numbered layer"
            yield f"layers_to_transform has {layer}, which the model has not: {known}"


def _warn_of_unused(settings: AdapterConfig, layout: Layout, contents: Contents) -> None:
    """A warning, as in PEFT, of entries that change nothing: patterns without an adapter, exclusions of no module."""
    names = {*contents.names, *contents.names.values(), *contents.parameters}
    unused = [f"rank_pattern {name!r}" for name in settings.ranks.unused(names)]
    unused += [f"alpha_pattern {name!r}" for name in settings.alphas.unused(names)]
    if unused:
        warnings.warn(f"{settings.file}: no adapter has a name that fits {', '.join(unused)}.", stacklevel=2)
    selection = settings.selection
    every = {*layout.memory.linear, *layout.memory.stacked, *layout.files.linear}
    excluded = selection.excluded or [selection.excluded_expression][: not is_slow(selection.excluded_expression)]
    if any(excluded) and not any(_is_excluded(selection, module) for module in every):
        warnings.warn(f"{settings.file}: exclude_modules names no module of the model: {excluded[0]!r}.", stacklevel=2)


def _named(settings: AdapterConfig, module: str) -> bool:
    """Whether target_parameters name the weight of a module."""
    return _ends(f"{module}.weight", settings.parameters)


def _tied_modules(layout: Layout, module: str) -> list[str]:
    """Both modules of a tied embedding or head, else none: with ensure_weight_tying PEFT names one of them."""
    linear = layout.memory.linear | layout.files.linear
    uses = [name for name, places in linear.items() if places[0].path in (layout.tied or ())]
    return uses if module in uses else []


def _has_experts(layout: Layout, contents: Contents) -> bool:
    """Whether the file has experts as modules of their own, as PEFT with transformers 4 had them."""
    return any(places[0].expert is not None and name in contents.names for name, places in layout.files.linear.items())


def _either(layout: Layout, full: set[str]) -> Callable[[str], bool]:
    """Whether a path is in `full`, the other use of a tied embedding counting too."""
    return lambda path: (
        path in full or (layout.tied is not None and path in layout.tied and bool({*layout.tied} & full))
    )


def _chosen(linear: Mapping[str, list[Place]], selection: Selection) -> dict[str, list[Place]]:
    return {name: places for name, places in linear.items() if selects(selection, name)}


def _parameters(form: Modules, ends: tuple[str, ...]) -> dict[str, list[Place]]:
    """The parameters that target_parameters name."""
    by_name = {f"{name}.weight": places for name, places in form.linear.items()}
    for container, parameters in form.stacked.items():
        by_name |= {f"{container}.{leaf}": places for leaf, places in parameters.items()}
    return {name: places for name, places in by_name.items() if _ends(name, ends)}


def _saved(tensors: Mapping[str, list[Place]], selection: Selection) -> dict[str, list[Place]]:
    """The tensors of modules that modules_to_save names, whose names it may cut anywhere."""
    return {name: places for name, places in tensors.items() if _is_inside(name, selection.saved)}


def _is_inside(tensor: str, saved: tuple[str, ...]) -> bool:
    parts = tensor.split(".")[:-1]
    return any(".".join(parts[: count + 1]).endswith(saved) for count in range(len(parts))) if saved else False


def _biases(form: Modules, bias: str, contents: Contents) -> dict[str, list[Place]]:
    """The biases that `bias` names: "all", or those of modules with an adapter."""
    biases = {name: places for name, places in form.tensors.items() if name.endswith(".bias") and bias != "none"}
    if bias == "lora_only":
        return {name: places for name, places in biases.items() if name.removesuffix(".bias") in contents.names}
    return biases
