"""Protocols of a family and of its Config, the traits that a family declares, and the kinds of its layers."""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any, ClassVar, Literal, Protocol, Self

import torch
from torch import Tensor

from fnmodels.models.common.config_json import ConfigJson
from fnmodels.models.common.storage import StoredNames
from fnmodels.ops.dropout import Dropout
from fnmodels.ops.moe.router import RouterDtypes
from fnmodels.ops.rotary import Rope
from fnmodels.ops.torch_internals import traced_as_constant
from fnmodels.options import Block
from fnmodels.tree import Tree


class DecoderConfig(Protocol):
    """A frozen, hashable dataclass with these fields and those of the family; CONFIG_DEFAULTS lists optional ones.

    `from_hf(values)` creates it from a config.json; `to_hf()` is the inverse.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def initializer_range(self) -> float: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def tie_word_embeddings(self) -> bool: ...
    @property
    def model_type(self) -> str: ...

    def to_hf(self) -> ConfigJson: ...


class UsualConfig(DecoderConfig, Protocol):
    """The further fields that `decoder` and `spec` read: grouped-query attention and one rotary table."""

    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def rope(self) -> Rope: ...
    @property
    def layer_kinds(self) -> tuple[str, ...]: ...


class RMSNormConfig(UsualConfig, Protocol):
    @property
    def rms_norm_eps(self) -> float: ...


class LayerNormConfig(UsualConfig, Protocol):
    @property
    def layer_norm_eps(self) -> float: ...


class LatentConfig(DecoderConfig, Protocol):
    """The widths of multi-head latent attention, see `ops.mla`."""

    @property
    def q_lora_rank(self) -> int | None: ...  # None: queries without a latent
    @property
    def kv_lora_rank(self) -> int: ...
    @property
    def qk_nope_head_dim(self) -> int: ...
    @property
    def qk_rope_head_dim(self) -> int: ...
    @property
    def v_head_dim(self) -> int: ...
    @property
    def attention_bias(self) -> bool: ...


class TwoRopesConfig(UsualConfig, Protocol):
    @property
    def local_rope(self) -> Rope: ...  # of sliding-window layers


# Optional fields of a Config and their defaults.
CONFIG_DEFAULTS: dict[str, Any] = {
    "sliding_window": None,
    "attention_softcap": None,
    "num_key_value_heads": 0,  # 0: as many as query heads
    "num_experts_per_tok": 0,
    "num_nextn_predict_layers": 0,
    "mrope_section": (),  # how many rotary frequencies read time, height and width
    "mrope_interleaved": True,  # and not one section after the other
    "head": "lm",  # see `common.heads`
    "head_by_file": False,  # files have a head of their own or none, whatever config.json says
    "num_labels": 0,
    "problem_type": "",  # what its labels are, see `common.heads.problem_of`
    "first_position": 0,  # the row of the position table that a document's first token reads
    "index_topk": 0,  # keys of a query in layers that choose them, see `is_indexed`
    "index_least_keys": 0,  # of a row in which they choose; 0: more than index_topk
    # heads of keys that each make a choice of their own, one after the other in the layer's; 0: one choice for all
    "choice_heads": 0,
    "dropout": Dropout(),
    "hidden_size_per_layer_input": 0,  # of what each layer reads beside the residual stream, see `layer_inputs`
    "ngram_size": 0,  # tokens of the longest n-gram that `embed` reads, inputs["preceding"]; 0: it reads none
    "memory_size": 0,  # the width of what a decoder's encoder returns; 0: that of the decoder
    "residual_streams": 0,  # rows of the residual stream between layers, [B, S, n, D]; 0: it is [B, S, D]
    "passes": (),  # of a stack with loops, the index in params["layers"] of each pass, see `stored_layers`
}


class Family(Protocol):
    """A module with these names; hf_names and Config.from_hf are needed only for checkpoints.

    Optional are TRAITS (a `Traits`), MODEL_TYPES (the model types of config.json that it reads), PRESETS ({name:
    config.json} of published models) and the functions of `function_of`.
    """

    @property
    def __name__(self) -> str: ...
    @property
    def Config(self) -> Any: ...
    @property
    def block(self) -> Block: ...  # made by `context.with_context`

    def spec(self, config: Any, /) -> Tree: ...
    def kinds(self, config: Any, /) -> tuple[str, ...]: ...
    def attention_masks(
        self, config: Any, positions: Tensor, segment_ids: Tensor, /, *, create: Any = None
    ) -> dict[str, Any]: ...  # values: `MaskLike`
    def freqs_cis(self, config: Any, positions: Tensor, /, *, length: int | Tensor | None = None) -> dict[str, Any]: ...
    def embed(self, params: Tree, inputs: Any, /, *, config: Any) -> Tensor: ...
    def unembed(self, params: Tree, x: Tensor, /, *, config: Any) -> Tensor: ...
    def hf_names(self, config: Any, /) -> StoredNames: ...


@dataclass(frozen=True)
class LayerKind:
    """A kind of layers, read from its name, whose words are joined by "_": "sliding_nope_moe", "indexed_shared".

    The names are the keys of masks and freqs_cis; nothing but `parse` reads them.
    """

    name: str
    attends: str  # the first word: "full", "sliding", "chunked", "indexed", or what the layer does in its place
    rotates: bool = True  # whether queries and keys have a rotary embedding: no word "nope"
    routed: bool = False  # "moe": experts; see `is_routed`
    first: bool = False  # "first": no norm before attention (ModernBERT)
    source: str | None = None  # "reuse": the kind whose keys and values its layers read in place of their own
    beside: str | None = None  # "reads": the kind whose keys of windows its layers read beside their own keys
    shares_choice: bool = False  # "indexed_shared": the keys that the last indexer before it has chosen
    joins: bool = False  # "joins": reads what the layer before has left for it (`Context.leave`)

    @property
    def lender(self) -> str | None:
        """The kind, by its `stem`, of which its layers read what the last layer has lent."""
        return self.source or self.beside

    @property
    def stem(self) -> str:
        """Its name without the words that say where its layers stand, what they read and which table they have."""
        return _stem(self.name.split("_"))

    @property
    def slides(self) -> bool:
        """Whether its attention has a sliding window."""
        return self.attends == "sliding"

    @property
    def ordered(self) -> bool:
        """Whether its layers read tokens in their order and not by position: recurrent layers and convolutions."""
        return self.attends in ("linear", "conv")

    @property
    def indexed(self) -> bool:
        """Whether its layers attend to a few keys that an indexer chooses (`Context.choose`)."""
        return self.attends == "indexed"

    @property
    def compresses(self) -> bool:
        """Whether its layers read keys of all windows of tokens before a query (`common.deepseek_v4.windows`)."""
        return self.attends == "compressed"

    @classmethod
    def parse(cls, name: str) -> "LayerKind":
        """The kind of this name. Words that it does not know belong to the family."""
        if torch.compiler.is_compiling():  # which would guard that the memory has no such name
            return cls._of(name)
        if name not in _PARSED:
            _PARSED[name] = cls._of(name)
        return _PARSED[name]

    @classmethod
    def _of(cls, name: str) -> "LayerKind":
        first, *words = name.split("_")
        return cls(
            name,
            attends=first,
            rotates="nope" not in words,
            routed="moe" in words,
            first="first" in words,
            source=_stem(name.split("_")) if "reuse" in words else None,
            beside=_stem(name.split("_")) if "reads" in words else None,
            shares_choice=first == "indexed" and "shared" in words,
            joins="joins" in words,
        )


_PLACES = ("reuse", "reads", "shared", "opens", "folds", "joins")  # words that are of a layer's place in the stack
_PARSED: dict[str, LayerKind] = {}


def _stem(words: Sequence[str]) -> str:
    return "_".join(word for word in words if word not in _PLACES and not word.startswith("ngrams"))


@dataclass(frozen=True)
class Traits:
    """Properties of its models that a family declares: `TRAITS = Traits(...)` in its file.

    A file that has the names of traits in capitals as constants of their own (`CAUSAL = False`) is read too.
    """

    kinds: tuple[str, ...] = ("full",)  # the kinds of its layers, the default first
    heads: tuple[str, ...] = ("lm", "none", "classification", "tokens")  # of its Config, the default first, see `heads`
    # or "patches": a vision tower, see `common.vision`; "latents": a diffusion model, see `fnmodels.diffusion`
    inputs: Literal["tokens", "patches", "latents"] = "tokens"
    causal: bool = True  # whether no token sees a later one, so that a model can generate
    routed: bool = False  # whether kinds with the word "moe" are MoE layers
    router: RouterDtypes | None = None  # the dtypes of its router
    sinks: bool = False  # whether its attention has sink logits
    biased: bool = False  # whether its attention has a `RelativeBias`
    # whether its function `shared` reads token ids, inputs["token_ids"], and returns a tensor [B, S, ...] of each token
    reads_ids: bool = False
    # whether `shared` returns tables [B, S, ...] of these tokens' positions, which attention reads, and nothing else
    shares_tables: bool = False
    left_axis: str = "embed"  # of what a layer leaves for the next, its last dimension (`Context.leave`)
    left_wide: bool = False  # whether that is in fp32 at least, and not in the dtype of the residual stream
    # {dropout rate in config.json: the fields of `Dropout` that it sets}; {rate: its value where a file has none}; and
    # {model type: its own rates in place of `dropout`}
    dropout: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"attention_dropout": ("weights",)})
    dropout_defaults: Mapping[str, float] = field(default_factory=dict)
    dropout_of: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)
    copies_saved: bool = True  # whether a save writes the names of `hf_copies` too, because other programs read them
    weights: str = "model"  # how the names of its files of tensors begin
    # {key of params that files may lack, such as MTP heads: the Config field with its length}
    optional: Mapping[str, str] = field(default_factory=dict)
    # the states that MTP heads read: "chained": the model's after its final norm, then those of the head before after
    # its own; "raw": before these norms; "streams": raw ones of several rows; "shared": the model's; see `fnmodels.mtp`
    mtp_reads: Literal["chained", "raw", "shared", "streams"] = "chained"
    # ends of the paths of tables of compressed token ids, which loading makes of tokenizer.json where files lack them
    of_tokenizer: tuple[str, ...] = ()
    leftovers: tuple[str, ...] = ()  # patterns of names in files that are not read, such as buffers
    # {part that is not read: pattern of its names in files}, which loading refuses without drop=(part,)
    unread: Mapping[str, str] = field(default_factory=dict)
    # {pattern of a name that transformers writes: the published name, with the pattern's groups}
    resaved: Mapping[str, str] = field(default_factory=dict)
    # names in a module, together, of tensors that transformers saves in equal parts of their sum
    equal_parts: tuple[tuple[str, ...], ...] = ()

    # {pattern in a published name: what transformers' module in memory has there}, each replaced once, in this order.
    # "{leaf}": the last part of the parameter's path without "_proj" or "_bias", where files fuse what modules do not
    in_memory: Mapping[str, str] = field(default_factory=dict)
    turned_in_memory: bool = False  # whether transformers' modules hold experts upright that files have transposed
    # {model type: another class that its files name}, where published files and transformers differ
    classes: Mapping[str, str] = field(default_factory=dict)
    says_transposed: bool = False  # whether transformers' module of its experts says so, by which PEFT orients adapters

    def __new__(cls, *values: Any, **named: Any) -> Self:
        """TypeError for a name that is no trait; dataclass makes `__init__`, which has the types."""
        for name in named:
            if name not in cls.__dataclass_fields__:
                near = difflib.get_close_matches(name, cls.__dataclass_fields__, 1)
                known = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(cls.__dataclass_fields__)}."
                raise TypeError(f"Traits has no trait {name!r}; {known}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for trait in fields(self):
            value, expected = getattr(self, trait.name), _VALUES.get(trait.name, (bool, "True or False"))
            if not isinstance(value, expected[0]):
                raise TypeError(f"The trait {trait.name} is {value!r}; it must be {expected[1]}.")
        if not self.kinds or not self.heads:
            raise TypeError("The traits kinds and heads must name at least one kind of layers and one head.")
        if self.inputs not in ("tokens", "patches", "latents"):
            raise TypeError(f"The trait inputs is {self.inputs!r}; it must be 'tokens', 'patches' or 'latents'.")
        if self.mtp_reads not in ("chained", "raw", "shared", "streams"):
            raise TypeError(f"The trait mtp_reads is {self.mtp_reads!r}, not 'chained', 'raw', 'shared' or 'streams'.")


_VALUES: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("kinds", "heads", "leftovers", "equal_parts", "of_tokenizer"), (tuple, "a tuple")),
    **dict.fromkeys(
        ("dropout", "dropout_defaults", "dropout_of", "optional", "unread", "resaved", "in_memory", "classes"),
        (Mapping, "a dict"),
    ),
    **dict.fromkeys(("inputs", "weights", "left_axis", "mtp_reads"), (str, "a string")),
    "router": (RouterDtypes | None, "a RouterDtypes, or None"),
}
_PLAIN = Traits()


@traced_as_constant  # dynamo cannot read an object of a module that is looked up by name
def traits_of(family: Any) -> Traits:
    """The traits of a family's module; TypeError if its TRAITS is no `Traits`."""
    traits = getattr(family, "TRAITS", None)
    if isinstance(traits, Traits):
        return traits
    if traits is not None:
        raise TypeError(f"{family.__name__}.TRAITS is {traits!r}; it must be a Traits(...).")
    constants = {name: getattr(family, name.upper()) for name in _NAMES if hasattr(family, name.upper())}
    return Traits(**constants) if constants else _PLAIN


_NAMES = tuple(trait.name for trait in fields(Traits))

OptionalFunction = (
    Literal["layer_inputs", "shared", "example_inputs", "outputs", "classify"]
    | Literal["stacks", "batch_inputs", "token_inputs", "hf_copies", "leftovers", "in_memory", "stream_norm"]
    | Literal["left_shape", "lent_like", "in_memory_forms", "mtp_kinds", "as_stated"]
)
_FUNCTIONS: dict[str, Callable[..., Any] | None] = {
    # (params, inputs, x, config=) -> [B, S, layers, P] for a config with hidden_size_per_layer_input P: what each layer
    # reads beside the residual stream. x [B, S, D]: what `embed` returns.
    "layer_inputs": None,
    # (params, inputs, config=) -> a tree of tensors that every layer reads beside the residual stream: `Context.shared`
    "shared": None,
    # (config, positions [B, S]) -> inputs with "positions" as its masks read them and what `embed` and `shared` read,
    # of a family that reads other inputs than token ids and patches
    "example_inputs": None,
    # (params, x, inputs, config=) -> what `forward` returns of hidden states x [B, S, D], of a model whose head reads
    # inputs too; such a family has no `unembed`
    "outputs": None,
    # (params, x, documents, config=) -> [N, labels]: the head "classification" on hidden states x [B, S, D]; None: that
    # of `decoder.classify`
    "classify": None,
    # (config) -> {"encoder": Config, "decoder": Config} of a model that has both, else {}; see `fnmodels.pairs`
    "stacks": lambda config: {},
    # (config, positions) -> {name: tensor [B, S, ...]} that `prepare` adds to the inputs
    "batch_inputs": lambda config, positions: {},
    # (config, tokens [B, S] or [B, S, D], segment_ids [B, S]) -> the same, of what depends on the document's tokens
    "token_inputs": lambda config, tokens, segment_ids: {},
    "hf_copies": lambda config: {},  # (config) -> {name on disk: path of the parameter that it duplicates}
    # (config) -> {path: name or slice in memory} of parameters that transformers' modules lay out otherwise than files
    "in_memory_forms": lambda config: {},
    "in_memory": lambda config: {},  # (config) -> patterns beside `Traits.in_memory`, which depend on the config
    # (x, weight, eps=) -> x: the norm around MTP heads, see `fnmodels.mtp`; None: `ops.norm.rms_norm`
    "stream_norm": None,
    # (config) -> the kinds of the layers that are the block of one MTP head; None: one layer of the last layer's kind
    "mtp_kinds": None,
    # (config, index) -> the dimensions after [B, S] of what the layer before `index` has left for it (`Context.left`)
    "left_shape": lambda config, index: (config.hidden_size,),
    # (config, kind, x [B, S, ..], keys) -> {name: a tensor like it} of what a layer of this kind lends, see `carried`
    "lent_like": None,
    "leftovers": lambda config: (),  # (config) -> patterns beside `Traits.leftovers`, which depend on the config
    "as_stated": None,  # (config, name, value of a leftover) -> whether it holds what follows from config.json
}


def function_of(family: Family, name: OptionalFunction) -> Any:
    """The function of this name that the family has, or its default; None where the family does nothing of the kind."""
    return getattr(family, name, _FUNCTIONS[name])


def model_types(family: Any) -> tuple[str, ...]:
    """The model types of config.json that a family's module says it reads."""
    types: tuple[str, ...] = getattr(family, "MODEL_TYPES", ())
    return types


def parsed(kinds: Iterable[str]) -> list[LayerKind]:
    """The kinds of these names."""
    return [LayerKind.parse(kind) for kind in kinds]


def is_routed(family: Family, kind: str) -> bool:
    """Whether layers of this kind are MoE layers."""
    return traits_of(family).routed and LayerKind.parse(kind).routed


def field_of(config: Any, name: str) -> Any:
    """A field of the config, or its default in CONFIG_DEFAULTS."""
    return getattr(config, name, CONFIG_DEFAULTS[name])


def stored_layers(config: Any, kinds: Sequence[str]) -> tuple[int, ...]:
    """The index in params["layers"] of each layer that runs. kinds: those of `Family.kinds`, one of each.

    A stack that runs some layers several times has the Config field `passes`, this tuple. Then a pass is what a layer
    is elsewhere: it has a kind, taps, edits, keys of dropout and an entry of a cache of its own, by its index.
    """
    return field_of(config, "passes") or tuple(range(len(kinds)))
