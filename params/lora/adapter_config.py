"""The audit of PEFT's adapter_config.json: every field is read, neutral, or refused with the reason."""

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fnmodels.errors import ConfigError, UnsupportedError
from fnmodels.models.common.config_json import shown
from params.io.files import read_json

CONFIG = "adapter_config.json"
_HIGHEST = 1 << 24  # of ranks and scales: far above all that exist, and exact in every float
_ANY = "\0"  # stands for any character in a name
_DEFAULT = 8  # PEFT's, of both
_BEFORE = r"(.*\.)?("  # what PEFT puts before a pattern
_EXPRESSIONS = 64  # of these in a field, beside names
_QUANTIFIERS = 2  # in a pattern of a file: with more of them, matching a name could take hours

READ = frozenset(
    {
        *("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora"),
        *("init_lora_weights", "target_parameters", "trainable_token_indices", "peft_version"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save", "bias"),
    }
)
# Fields that change nothing in what the tensors of a file compute, and why.
NEUTRAL: dict[str, str] = {
    **dict.fromkeys(("task_type", "auto_mapping", "base_model_name_or_path", "revision"), "where it comes from"),
    **dict.fromkeys(("inference_mode", "lora_dropout", "velora_config", "runtime_config"), "acts in training alone"),
    **dict.fromkeys(("loftq_config", "eva_config", "corda_config", "lora_ga_config"), "init_lora_weights says it"),
    "fan_in_fan_out": "how PEFT's module stores its weight; A and B are the same",
    "qalora_group_size": "use_qalora says it",
    "megatron_core": "megatron_config says it",
    "ensure_weight_tying": "the tensors of both uses are in the file",
}
# Fields that are refused unless they are off: what they do.
REFUSED: dict[str, str] = {
    "alora_invocation_tokens": "the adapter acts only behind these tokens of a prompt",
    "arrow_config": "a router mixes several adapters",
    "kasa_config": "the base weights lose their smallest singular values",
    "layer_replication": "layers of the base model are repeated",
    "lora_bias": "B has a bias",
    "megatron_config": "modules are Megatron's",
    "monteclora_config": "adapters are sampled",
    "use_bdlora": "A or B is block-diagonal",
    "use_qalora": "inputs are pooled before A",
}
_OR_EXPRESSION = ("target_modules", "exclude_modules")  # lists of names, or a regular expression
_ALL_LINEAR = "all-linear"
_INITIAL = ("true", "false", "gaussian", "eva", "orthogonal", "mica")  # the base model is as published
_MUTATED = ("pissa", "olora")  # the base model has lost what A and B begin with, which follows from it
_TRAINED_WITH = {  # the base model has lost what no file says
    "corda": "its data",
    "lora_ga": "its gradients",
    "loftq": "its quantized form",
    "pissa_niter": "a random projection",
}


@dataclass(frozen=True)
class Patterns:
    """The values of modules by patterns of their names, of which the first that matches counts.

    names: {name, or the end of one, with _ANY for a dot that stands for any character: (its place in the file, value)}.
    dots: {length of such a name: the places of these dots}. expressions: (place, expression, value).
    """

    names: dict[str, tuple[int, float]]
    dots: dict[int, set[tuple[int, ...]]]
    expressions: tuple[tuple[int, re.Pattern[str], float], ...]

    def value(self, module: str, default: float) -> float:
        """The value of a module of this name."""
        keys = [_with_any(end, places) for end in _ends_of(module) for places in self.dots.get(len(end), ())]
        matches = [self.names[key] for key in keys if key in self.names]
        matches += [(place, value) for place, pattern, value in self.expressions if pattern.match(module)]
        return min(matches, default=(0, default))[1]

    def unused(self, modules: Collection[str]) -> list[str]:
        """The patterns, as they are in the file, that match none of these modules."""
        ends = {end for module in modules for end in _ends_of(module)}
        found = {_with_any(end, places) for end in ends for places in self.dots.get(len(end), ())}
        names = [name.replace(_ANY, ".") for name in self.names if name not in found]
        expressions = [pattern for _, pattern, _ in self.expressions if not any(map(pattern.match, modules))]
        return names + [pattern.pattern.removeprefix(_BEFORE).removesuffix(")$") for pattern in expressions]


def _ends_of(module: str) -> list[str]:
    """The ways in which a pattern may name a module: in full, or from one of its parts on."""
    parts = module.split(".")
    return ["^" + module, *(".".join(parts[start:]) for start in range(len(parts)))]


def _with_any(name: str, places: tuple[int, ...]) -> str:
    """The name with _ANY in these places."""
    letters = list(name)
    for place in places:
        letters[place] = _ANY
    return "".join(letters)


@dataclass(frozen=True)
class Selection:
    """The modules that the fields name.

    modules: names, or ends of names; None: not said. expression: of target_modules, in place of names. excluded,
    excluded_expression: of exclude_modules. layers, patterns: of layers_to_transform and layers_pattern. saved: of
    modules_to_save.
    """

    modules: tuple[str, ...] | None = None
    expression: str = ""
    excluded: tuple[str, ...] = ()
    excluded_expression: str = ""
    layers: tuple[int, ...] = ()
    patterns: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()


@dataclass(frozen=True)
class AdapterConfig:
    """The settings of an adapter_config.json that give the tensors beside it their meaning.

    ranks, alphas: of modules that differ from `rank` and `alpha`.
    mutated: "pissa" or "olora", what the base model has lost; "": nothing. parameters: the ends of names of
    parameters, not modules, that have adapters. token_rows: (end of a module's name, rows of its embedding that are
    trained); "" for every module. selection, bias: what else the file must have, and may.
    """

    file: Path
    rank: int
    alpha: float
    rslora: bool
    dora: bool
    ranks: Patterns
    alphas: Patterns
    mutated: str
    parameters: tuple[str, ...]
    token_rows: tuple[tuple[str, tuple[int, ...]], ...]
    peft_version: str
    selection: Selection = Selection()
    bias: str = "none"

    def rank_of(self, module: str) -> int:
        """The rank of the adapter of a module of this name."""
        return int(self.ranks.value(module, self.rank))

    def scale_of(self, module: str) -> float:
        """The factor of the product B A in a module of this name."""
        alpha, rank = self.alphas.value(module, self.alpha), self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def read_config(file: Path, ignore_fields: Collection[str] = ()) -> AdapterConfig:
    """The config of a LoRA, rsLoRA, DoRA, PiSSA or OLoRA adapter; ConfigError or UnsupportedError for anything else.

    ignore_fields: names of unknown fields that are read over; ConfigError for others, and for one that is not there.
    """
    values: Any = read_json(file)
    if not isinstance(values, dict) or values.get("peft_type") != "LORA":
        raise UnsupportedError(f"{file}: it must be a JSON object with the peft_type LORA.")
    if isinstance(ignore_fields, str):
        raise TypeError(f"ignore_fields is {ignore_fields!r}; it is a tuple of names, such as ({ignore_fields!r},).")
    if known := sorted(name for name in ignore_fields if name not in values or _is_known(name)):
        raise ConfigError(
            f"{file}: ignore_fields has {shown(known[0])}, which is no unknown field: it is read, or refused, or not "
            "there."
        )
    values = {name: value for name, value in values.items() if name not in ignore_fields}
    _audit(file, values)
    rank, alpha = (
        _rank(file, "r", values.get("r", _DEFAULT)),
        _alpha(file, "lora_alpha", values.get("lora_alpha", _DEFAULT)),
    )
    rslora, dora = (values.get(name) or False for name in ("use_rslora", "use_dora"))
    if not isinstance(rslora, bool) or not isinstance(dora, bool):
        raise ConfigError(f"{file}: use_rslora is {rslora!r} and use_dora {dora!r}; they must be true or false.")
    return AdapterConfig(
        file=file,
        rank=rank,
        alpha=alpha,
        rslora=rslora,
        dora=dora,
        ranks=_patterns(file, values, "rank_pattern", _rank),
        alphas=_patterns(file, values, "alpha_pattern", _alpha),
        mutated=_mutated(file, values.get("init_lora_weights")),
        parameters=_names(file, values, "target_parameters"),
        token_rows=_token_rows(file, values.get("trainable_token_indices")),
        peft_version=str(values.get("peft_version") or ""),
        selection=_selection(file, values),
        bias=values.get("bias") or "none",
    )


def _is_known(name: str) -> bool:
    return name in READ or name in NEUTRAL or name in REFUSED or name.startswith("_") or "." in name


def _audit(file: Path, values: Mapping[str, Any]) -> None:
    """Errors for fields that are refused, or that nobody knows and that are not off."""
    for name, value in values.items():
        if name in REFUSED and value not in (None, False, {}, []):
            raise UnsupportedError(f"{file}: {name} is {shown(value)} ({REFUSED[name]}), which is not supported.")
        is_off = value is None or value is False or value == {} or value == []
        if not _is_known(name) and not is_off:
            raise ConfigError(
                f"{file}: the field {name!r} is unknown ({shown(value)}); if it changes nothing in what the adapter "
                f"computes, pass ignore_fields=({name!r},)."
            )
    if values.get("bias", "none") not in ("none", "all", "lora_only", None):
        raise ConfigError(f"{file}: bias is {shown(values['bias'])}; it must be none, all or lora_only.")


def _rank(file: Path, name: str, rank: Any) -> int:
    if type(rank) is not int or not 1 <= rank <= _HIGHEST:
        raise ConfigError(f"{file}: {name} is {shown(rank)}; a rank is a whole number from 1.")
    return rank


def _alpha(file: Path, name: str, alpha: Any) -> float:
    number = isinstance(alpha, (int, float)) and not isinstance(alpha, bool)
    if not number or not -_HIGHEST <= alpha <= _HIGHEST:  # also NaN
        raise ConfigError(f"{file}: {name} {shown(alpha)} is no number that scales an adapter.")
    return float(alpha)


def is_slow(pattern: str) -> bool:
    """Whether matching a regular expression of a stranger could take hours."""
    return len(re.findall(r"[*+{]", pattern)) > _QUANTIFIERS or re.search(r"\)[*+{]", pattern) is not None


def _selection(file: Path, values: Mapping[str, Any]) -> Selection:
    """The fields that name modules; their expressions are compiled, slow ones aside."""
    texts = {name: values[name] for name in _OR_EXPRESSION if isinstance(values.get(name), str)}
    for name, text in texts.items():
        try:
            re.compile(text)
        except re.error as error:
            raise ConfigError(f"{file}: {name} is {shown(text)}, no regular expression: {error}.") from None
    names = {name: () if name in texts else _names(file, values, name) for name in (*_OR_EXPRESSION, "modules_to_save")}
    target = texts.get("target_modules", "")
    layers = values.get("layers_to_transform")
    layers = [] if layers is None else layers if isinstance(layers, list) else [layers]
    if not all(type(layer) is int and layer >= 0 for layer in layers):
        raise ConfigError(f"{file}: layers_to_transform is {shown(layers)}; it must be numbers of layers.")
    patterns = values.get("layers_pattern") or []
    patterns = [patterns] if isinstance(patterns, str) else _names(file, values, "layers_pattern")
    said = values.get("target_modules") is not None or values.get("target_parameters") is not None
    return Selection(
        modules=names["target_modules"] if said and not target else None,
        expression="" if target.lower() == _ALL_LINEAR else target,
        excluded=names["exclude_modules"],
        excluded_expression=texts.get("exclude_modules", ""),
        layers=tuple(layers),
        patterns=tuple(patterns),
        saved=names["modules_to_save"],
    )


def _patterns(file: Path, values: Mapping[str, Any], field: str, read: Callable[..., float]) -> Patterns:
    """The entries of rank_pattern or alpha_pattern, whose keys are regular expressions of a stranger."""
    patterns = values.get(field) or {}
    if not isinstance(patterns, dict):
        raise ConfigError(f"{file}: {field} is {shown(patterns)}; it maps names of modules to numbers.")
    names: dict[str, tuple[int, float]] = {}
    dots: dict[int, set[tuple[int, ...]]] = {}
    expressions: list[tuple[int, re.Pattern[str], float]] = []
    for place, (pattern, value) in enumerate(patterns.items()):
        number, plain = read(file, pattern, value), re.sub(r"\\([.-])", r"\1", pattern)
        if re.fullmatch(r"\^?[\w.-]+", plain):
            name = re.sub(r"\\([.-])|\.", lambda match: match[1] or _ANY, pattern)
            dots.setdefault(len(name), set()).add(tuple(at for at, letter in enumerate(name) if letter == _ANY))
            names.setdefault(name, (place, number))
            continue
        short = repr(pattern[:80])
        if is_slow(pattern) or len(expressions) == _EXPRESSIONS:
            raise UnsupportedError(
                f"{file}: {field} has the pattern {short}, which repeats a group or in more than {_QUANTIFIERS} "
                f"places, or is one of more than {_EXPRESSIONS}: this could take hours; write the modules' names."
            )
        try:
            expressions.append((place, re.compile(f"{_BEFORE}{pattern})$"), number))
        except re.error as error:
            raise ConfigError(f"{file}: the pattern {short} of {field} is no regular expression: {error}.") from None
    return Patterns(names, dots, tuple(expressions))


def _mutated(file: Path, initial: Any) -> str:
    """The method that changed the base model, by init_lora_weights, or "". UnsupportedError for an unknown change."""
    name = str(True if initial is None else initial).lower()
    if name in _INITIAL:
        return ""
    if name in _MUTATED:
        return name
    if (kind := re.sub(r"_\d+$", "", name)) in _TRAINED_WITH:
        way = "convert them by PEFT's path_initial_model_for_weight_conversion"
        way = "merge them into the model in PEFT" if kind == "loftq" else way
        raise UnsupportedError(
            f"{file}: init_lora_weights is {shown(initial)}: the base model that these adapters add to was changed "
            f"by {_TRAINED_WITH[kind]}; {way}."
        )
    raise UnsupportedError(f"{file}: init_lora_weights {shown(initial)} is unknown.")


def _names(file: Path, values: Mapping[str, Any], name: str) -> tuple[str, ...]:
    names = values.get(name) or []
    if not isinstance(names, list) or not all(isinstance(entry, str) and entry for entry in names):
        raise ConfigError(f"{file}: {name} is {shown(names)}; it must be a list of names.")
    return tuple(names)


def _token_rows(file: Path, rows: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
    by_module = rows if isinstance(rows, dict) else {"": rows or []}
    for name, ids in by_module.items():
        if not isinstance(ids, list) or not all(type(token_id) is int and token_id >= 0 for token_id in ids):
            raise ConfigError(f"{file}: trainable_token_indices of {name!r} is {shown(ids)}; it must be a list of ids.")
    return tuple((name, tuple(ids)) for name, ids in by_module.items())
