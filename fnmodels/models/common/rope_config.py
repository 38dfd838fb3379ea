"""Rotary embedding settings of config.json, in both dialects: conversion to and from `Rope`."""

from collections.abc import Mapping
from typing import Any

from fnmodels.errors import ConfigError, UnsupportedError
from fnmodels.models.common.config_json import ConfigJson
from fnmodels.ops.rotary import Rope

from .config_json import _MISSING, Fields, shown

_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate"),
    ),
    "proportional": ("factor",),
    "longrope": ("factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"),
}


def rope_from_hf(
    fields: Fields, *, head_dim: int, max_positions: int, theta: float = 1e4, partial: float | None = None
) -> Rope:
    """The `Rope` of a model with one rotary table, from either dialect; arguments as for `parse_rope`."""
    inner = Fields(rope_values(fields, partial or 1.0), f"{fields.where}, rope")
    return parse_rope(inner, head_dim=head_dim, max_positions=max_positions, theta=theta, partial=partial)


def rope_values(fields: Fields, partial: float = 1.0) -> dict[str, Any]:
    """The rope object of one table: `rope_parameters`, or the older `rope_theta` with `rope_scaling`.

    partial: the family's default fraction, which transformers 5.0 writes beside any in `rope_parameters`, and ignores.
    """
    new, old = fields.take("rope_parameters", None), fields.take("rope_scaling", None)
    for name, value in (("rope_parameters", new), ("rope_scaling", old)):
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{fields.where}: {name!r} is {shown(value)}, but must be an object or null.")
    if new is not None and old is not None and _scaling(new) != _scaling(old):
        raise ConfigError(f"{fields.where} has both 'rope_parameters' and 'rope_scaling', and they disagree.")
    inner = {**(old or {}), **(new or {})}
    for name in ("rope_theta", "partial_rotary_factor"):
        outer = fields.take(name, None)
        if name == "partial_rotary_factor" and name in (new or ()) and outer == partial:
            continue
        if outer is not None and inner.setdefault(name, outer) != outer:
            raise ConfigError(
                f"{fields.where}: {name!r} is {shown(outer)} at the top and {shown(inner[name])} in the rope."
            )
    return inner


def with_rotary_dim(fields: Fields, head_dim: int) -> Fields:
    """The fields with `rotary_dim` of MiniMax's files, a number of dimensions, as `partial_rotary_factor`.

    head_dim: the family's default; 0: hidden_size / heads.
    """
    if fields.values.get("rotary_dim") is None:
        return fields
    width = head_dim or fields.integer("hidden_size") // fields.integer("num_attention_heads")
    share = fields.integer("rotary_dim") / fields.integer("head_dim", width)
    if fields.take("partial_rotary_factor", share) != share:
        raise UnsupportedError(f"{fields.where}: 'rotary_dim' and 'partial_rotary_factor' disagree.")
    return Fields({n: v for n, v in fields.values.items() if n != "rotary_dim"} | {"partial_rotary_factor": share})


def _scaling(rope: Mapping[str, Any]) -> dict[str, Any]:
    """A rope object as the older `rope_scaling`: without the fields that have keys of their own in that dialect."""
    named = {"rope_type" if name == "type" else name: value for name, value in rope.items()}
    return {name: value for name, value in named.items() if name not in ("rope_theta", "partial_rotary_factor")}


def split_sections(fields: Fields, *, interleaved: bool = True) -> tuple[Fields, tuple[int, ...], bool]:
    """(the fields with a rope of one axis, `mrope_section` or (), `mrope_interleaved`).

    interleaved: the default of the last one, which is True without sections.
    """
    rope = fields.values.get("rope_parameters") or fields.values.get("rope_scaling")
    if not isinstance(rope, Mapping):
        return fields, (), True
    inner = Fields(rope, f"{fields.where}, rope")
    interleaved = inner.boolean("mrope_interleaved", interleaved)
    sections = inner.take("mrope_section", [])
    if not isinstance(sections, list) or len(sections) not in (0, 3) or any(type(n) is not int for n in sections):
        raise ConfigError(f"{inner.where}: 'mrope_section' is {shown(sections)}, but must be three integers.")
    plain = {name: value for name, value in rope.items() if not name.startswith("mrope_")}
    plain |= {name: "default" for name in ("type", "rope_type") if plain.get(name) == "mrope"}  # in older files
    named = {name: plain for name in ("rope_parameters", "rope_scaling") if fields.values.get(name) == rope}
    return Fields({**fields.values, **named}, fields.where), tuple(sections), interleaved or not sections


def sections_to_hf(config: Any) -> ConfigJson:
    """The rope object of a config whose positions have three axes: the inverse of `split_sections`."""
    own = {"mrope_section": list(config.mrope_section), "mrope_interleaved": config.mrope_interleaved}
    if getattr(type(config), "rope", config.rope).partial != 1:  # the family's default, so 1 has to be said
        own["partial_rotary_factor"] = config.rope.partial
    return rope_to_hf(config.rope) | own


def ropes_by_layer_type(
    fields: Fields,
    thetas: Mapping[str, float],
    *,
    scaled: str,
    head_dim: int,
    max_positions: int,
    partials: Mapping[str, float] | None = None,
) -> dict[str, Rope]:
    """A `Rope` for each layer type, from `rope_parameters` nested by layer type or from the older top-level fields.

    thetas: the family's defaults. scaled: the layer type that the older `rope_theta` and `rope_scaling` apply to.
    partials: default fractions that rotate, of a family that has such; it has no older files.
    """
    nested, sizes = fields.take("rope_parameters", None), {"head_dim": head_dim, "max_positions": max_positions}
    if not isinstance(nested, Mapping) or not set(nested) & set(thetas):
        ropes = {scaled: rope_from_hf(fields, **sizes, theta=thetas[scaled], partial=(partials or {}).get(scaled))}
        others = {name: theta for name, theta in thetas.items() if name != scaled}
        return ropes | {name: Rope(theta, partial=(partials or {}).get(name, 1.0)) for name, theta in others.items()}
    unknown = sorted(set(nested) - set(thetas))
    if unknown:
        raise ConfigError(f"{fields.where}: 'rope_parameters' has {', '.join(unknown)} beside {', '.join(thetas)}.")
    ropes = {}
    for name, theta in thetas.items():
        given, partial = nested.get(name), (partials or {}).get(name)
        inner = Fields({} if given is None else given, f"{fields.where}, rope of {name}")
        ropes[name] = parse_rope(inner, **sizes, theta=theta, partial=partial)
    return ropes


def parse_rope(
    fields: Fields, *, head_dim: int, max_positions: int, theta: float, partial: float | None = None
) -> Rope:
    """The `Rope` of one Hugging Face rope object; ConfigError or UnsupportedError with the field's name.

    theta: the family's default base. partial: its default fraction of rotary dimensions per head; None for a family
    that rotates all of them: a partial_rotary_factor is refused, because transformers ignores it or fails.
    """
    if {"rope_type", "type"} <= set(fields.values) and fields.values["rope_type"] != fields.values["type"]:
        raise ConfigError(f"{fields.where}: 'rope_type' and 'type' disagree.")
    fields.take("type", None)
    kind = fields.choice("rope_type", tuple(_ROPE_KEYS), default=fields.values.get("type") or "default")
    if partial is None and kind != "proportional":
        fields.expect("partial_rotary_factor", 1, 1.0)
    share = fields.number("partial_rotary_factor", partial or 1.0, high=1.0)
    theta = fields.number("rope_theta", theta)
    dim = head_dim if kind == "proportional" else int(head_dim * share)
    if dim % 2 or not 2 <= dim <= head_dim:
        raise ConfigError(f"{fields.where}: {dim} of {head_dim} head dimensions would rotate; it must be even and fit.")
    known = _ROPE_KEYS[kind]
    original = max_positions
    if "original_max_position_embeddings" in known:
        original = fields.integer("original_max_position_embeddings", max_positions)
    rest: dict[str, Any] = {}
    for name in known:
        if name in ("low_freq_factor", "high_freq_factor") or (
            name in ("beta_fast", "beta_slow", "attention_factor") and fields.values.get(name) is not None
        ):
            rest[name] = fields.number(name)
        elif name in ("mscale", "mscale_all_dim"):
            rest[name] = fields.number(name, 0.0, above=-1e-9)
    if "factor" in known:
        default: Any = _MISSING
        if kind in ("yarn", "longrope", "proportional"):
            default = 1.0 if kind == "proportional" else max_positions / original
        rest["factor"] = fields.number("factor", default)
    if kind == "yarn":
        rest["truncate"] = fields.boolean("truncate", True)
    if kind == "longrope":
        rest |= {name: fields.numbers(name, dim // 2) for name in ("short_factor", "long_factor")}
    if kind == "llama3" and rest["low_freq_factor"] > rest["high_freq_factor"]:
        raise ConfigError(f"{fields.where}: 'low_freq_factor' must not be above 'high_freq_factor'.")
    if kind == "dynamic" and dim == 2:
        raise ConfigError(f"{fields.where}: dynamic scaling needs more than 2 rotating dimensions.")
    # transformers writes this field for every rope type of an extended model, but only three types read it
    finetuned = ("finetuned",) if kind == "yarn" else ()  # of Yarn-Llama-2: how it was made
    fields.finish(ignored=("original_max_position_embeddings", *finetuned))
    needs_original = kind not in ("default", "linear", "proportional")
    return Rope(theta, kind, share, original_max_position_embeddings=original if needs_original else 0, **rest)


def rope_to_hf(rope: Rope) -> ConfigJson:
    """The rope object for config.json, which `parse_rope` reads back."""
    out: ConfigJson = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.partial != 1:
        out["partial_rotary_factor"] = rope.partial
    for name in _ROPE_KEYS[rope.kind]:
        value = getattr(rope, name)
        if value is not None and not (name.startswith("mscale") and value == 0):
            out[name] = list(value) if isinstance(value, tuple) else value
    return out
