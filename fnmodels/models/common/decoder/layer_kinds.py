"""The kind of each layer, and the fields of config.json that list layers or give their pattern."""

from collections.abc import Mapping, Sequence
from typing import Any

from fnmodels.errors import ConfigError, UnsupportedError

from ..config_json import Fields, shown
from ..family import UsualConfig


def kinds(config: UsualConfig) -> tuple[str, ...]:
    """The kind of each layer, the keys of masks and freqs_cis."""
    names: tuple[str, ...] = config.layer_kinds
    return names


def sliding_layers(
    fields: Fields,
    default: Sequence[bool],
    near: str = "sliding_attention",
    far: str = "full_attention",
    *,
    name: str = "layer_types",
) -> list[bool]:
    """Whether each layer is local (sliding window): from `layer_types` if given, else `default`, the family's rule.

    near, far: the names of local and other layers in the list; in Llama 4 the first are "chunked_attention".
    name: that of the list.
    """
    types = fields.take(name, None)
    if types is None:
        return list(default)
    known = {far: False, near: True}
    if not isinstance(types, list) or len(types) != len(default) or any(t not in list(known) for t in types):
        raise ConfigError(
            f"{fields.where}: {name!r} must name {len(default)} layers, each {' or '.join(map(repr, known))}."
        )
    return [known[t] for t in types]


def one_window(fields: Fields, layers: int, suffix: str = "") -> dict[str, Any]:
    """The Config fields of a window that all layers have, or none; suffix: the end of their kind, such as "_moe"."""
    window = fields.integer("sliding_window", 0, low=0) or None
    return {"sliding_window": window, "layer_kinds": (("sliding" if window else "full") + suffix,) * layers}


def sliding_pattern(fields: Fields, default: int) -> int:
    """n, where every nth layer has full attention and the others a sliding window, under its old or new field name."""
    names = [n for n in ("sliding_window_pattern", "_sliding_window_pattern") if fields.take(n, None) is not None]
    patterns = [fields.integer(name) for name in names] or [default]
    if len(set(patterns)) > 1:
        raise ConfigError(
            f"{fields.where}: {' and '.join(map(repr, names))} disagree: {patterns[0]} and {patterns[1]}."
        )
    return patterns[0]


def patterned_layers(fields: Fields, pattern: int, layers: int) -> list[bool]:
    """Whether each layer has a sliding window: from `layer_types`, or by the pattern; ConfigError if these disagree."""
    rule = [(i + 1) % pattern != 0 for i in range(layers)]
    slides = sliding_layers(fields, rule)
    # The new name may disagree: transformers writes its default beside any list and reads only the list.
    if slides != rule and fields.values.get("sliding_window_pattern") is not None:
        raise ConfigError(f"{fields.where}: 'layer_types' is not what 'sliding_window_pattern' {pattern} makes.")
    return slides


def listed_kinds(fields: Fields, names: Sequence[str], known: Mapping[str, str]) -> tuple[str, ...] | None:
    """The kind of each layer from the list under any of `names`, whose entries are keys of `known`; None without one.

    A string is a list of letters. ConfigError for other entries and for two lists that disagree.
    """
    lists: list[tuple[str, ...]] = []
    present = [name for name in names if fields.take(name, None) is not None]
    for name in present:
        types = fields.values[name]
        if not isinstance(types, list | str) or not types or any(t not in list(known) for t in types):
            raise ConfigError(
                f"{fields.where}: {name!r} is {shown(types)}, but must name the layers, each one of {', '.join(known)}."
            )
        lists.append(tuple(known[t] for t in types))
    if len(set(lists)) > 1:
        raise ConfigError(f"{fields.where}: {' and '.join(map(repr, present))} disagree.")
    return lists[0] if lists else None


def layer_types(slides: Sequence[bool], near: str = "sliding_attention") -> list[str]:
    """The `layer_types` list for config.json, which `sliding_layers` reads back."""
    return [near if s else "full_attention" for s in slides]


def layer_overrides(fields: Fields, layers: Sequence[int]) -> list[Fields]:
    """The objects of `per_layer_config`, where transformers writes what layers have of their own; [] without it.

    ConfigError unless it has an object for each of `layers` and for no other one.
    """
    given = fields.take("per_layer_config", None)
    if given is None:
        return []
    where = f"{fields.where}, per_layer_config"
    numbers = {str(key).zfill(4) for key in given} if isinstance(given, Mapping) else None  # "05" or 5
    if numbers != {str(index).zfill(4) for index in layers}:
        raise ConfigError(f"{where} is {shown(given)}, but must have an object for each of the layers {list(layers)}.")
    return [Fields(values, where) for values in given.values()]


def by_window(
    fields: Fields, name: str, listed: Any, slides: Sequence[bool], default: Any, *, low: int = 0
) -> dict[bool, Any]:
    """{whether a layer slides: what such layers have}, of a field that lists a number for each layer.

    listed: the list. default: that of a type without a layer. low: the least number.
    """
    alike = isinstance(listed, list) and len(listed) == len(slides) and all(_is_number(one, low) for one in listed)
    pairs = set(zip(slides, listed, strict=True)) if alike else set()
    if not alike or len({near for near, _ in pairs}) < len(pairs):
        raise UnsupportedError(
            f"{fields.where}: {name!r} is {shown(listed)}; it must list {len(slides)} numbers of at least {low}, one "
            "for all full layers and one for all sliding ones."
        )
    return {False: default, True: default} | dict(pairs)


def _is_number(value: Any, low: int) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= low


def rotating_layers(fields: Fields, listed: Any, layers: int) -> list[int]:
    """1 for layers with rotary embedding, 0 for others: `listed`, or by `no_rope_layer_interval` if it is None.

    The interval is not compared with the list: transformers writes its default 4 beside any list and ignores it.
    """
    every = fields.integer("no_rope_layer_interval", 4)
    rotating = [int((i + 1) % every != 0) for i in range(layers)] if listed is None else listed
    if not isinstance(rotating, list) or len(rotating) != layers or any(one not in (0, 1) for one in rotating):
        raise ConfigError(
            f"{fields.where}: 'no_rope_layers' must be a list of {layers} zeros (no rope) and ones (rope)."
        )
    return rotating
