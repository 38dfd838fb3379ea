"""DeBERTa, V2 and V3 (arXiv 2006.03654, 2111.09543): BERT whose scores have disentangled terms of distances.

There are no absolute positions: each layer projects the embeddings of distances, and a score adds what the query has to
do with the distance, and what the key has. Layers of V2 and V3 project distances as they do tokens; those of the first
DeBERTa have projections of their own for them, and no bias of keys.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.errors import UnsupportedError
from fnmodels.inputs.documents import Documents
from fnmodels.inputs.values import constants
from fnmodels.models.common import encoder, encoder_storage
from fnmodels.models.common.config_json import ConfigJson, Fields, shown
from fnmodels.models.common.encoder import attention_masks, block, freqs_cis, kinds, unembed  # noqa: F401
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import embedding, layer_norm_leaves
from fnmodels.models.common.storage import Stored, StoredNames, TensorSlice
from fnmodels.ops import embed_tokens, layer_norm
from fnmodels.ops.attention.disentangled import DistanceEmbeddings, rows_of_distances
from fnmodels.tree import Tree

MODEL_TYPES = ("deberta-v2", "deberta")
_CLASSES = {"deberta-v2": "DebertaV2", "deberta": "Deberta"}
TRAITS = Traits(
    dropout=encoder.DROPOUT,
    dropout_defaults=dict.fromkeys(encoder.DROPOUT, 0.1),
    causal=False,
    biased=True,
    resaved={
        # the published files of the first DeBERTa and of V3 have the masked-LM head under these names
        r"lm_predictions\.lm_head\.bias": "cls.predictions.bias",
        r"lm_predictions\.lm_head\.(.*)": r"cls.predictions.transform.\1",
        r"deberta\.(.*)": r"\1",  # a model without a head may be stored with the prefix of one that has it
    },
)
_NEWER = "lm_predictions.lm_head"
_OWN = dict.fromkeys("qkv", "in_proj") | {"distance_q": "pos_q_proj", "distance_k": "pos_proj"}
_HEADS = {
    "masked_lm": {
        "head.dense": "cls.predictions.transform.dense",
        "head.norm": "cls.predictions.transform.LayerNorm",
        "lm_head": "cls.predictions.decoder",
        "lm_head_bias": "cls.predictions.bias",
    },
    "classification": {"head.dense": "pooler.dense", "head.score": "classifier"},
    "tokens": {"head.score": "classifier"},
    "question_answering": {"head.score": "qa_outputs"},
    "none": {},
}


@dataclass(frozen=True)
class Config(encoder.EncoderConfig):
    """Sizes and switches. position_buckets: half of the rows of distances, where they share rows; 0: each has its own.

    max_relative_positions: distances of more share the last row. own_distances: layers have projections of distances.
    legacy: files name the masked-LM head as BERT's.
    """

    type_vocab_size: int = 0
    layer_norm_eps: float = 1e-7
    position_buckets: int = 0
    max_relative_positions: int = 512
    own_distances: bool = False
    legacy: bool = field(default=True, compare=False)

    @property
    def score_scale(self) -> float:
        """A score is the sum of three products."""
        return float((3 * self.head_dim) ** -0.5)

    @property
    def span(self) -> int:
        """Half of the rows of the table of distances."""
        return self.position_buckets or self.max_relative_positions

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        model_type = fields.choice("model_type", MODEL_TYPES)
        first = model_type == "deberta"
        newer = {} if first else {"share_att_key": True, "norm_rel_ebd": "layer_norm"}
        for name, only in {"relative_attention": True, **newer}.items():
            if fields.take(name, None) != only:
                fields.expect(name, only)
                raise UnsupportedError(f"{fields.where} has no {name!r}; only {shown(only)} is supported here.")
        if fields.boolean("position_biased_input", True):
            raise UnsupportedError(f"{fields.where}: 'position_biased_input' is true; only false is supported here.")
        terms = fields.take("pos_att_type", [])
        terms = terms.lower().split("|") if isinstance(terms, str) else terms
        if not isinstance(terms, list) or sorted(map(str, terms)) != ["c2p", "p2c"]:
            raise UnsupportedError(f"{fields.where}: 'pos_att_type' is {shown(terms)}; only both of c2p and p2c are.")
        default: dict[str, Any] = {"type_vocab_size": 0, "layer_norm_eps": 1e-7}
        usual = encoder.encoder_fields(fields, model_type, _CLASSES[model_type], **default)
        fields.expect("conv_kernel_size", 0)
        fields.expect("talking_head", False)
        fields.expect("embedding_size", usual["hidden_size"])
        fields.expect("pooler_hidden_size", usual["hidden_size"])
        fields.expect("pooler_hidden_act", "gelu")
        fields.expect("attention_head_size", usual["hidden_size"] // usual["num_attention_heads"])
        most = fields.integer("max_relative_positions", -1, low=-1)
        config = Config(
            **usual,
            position_buckets=0 if first else max(0, fields.integer("position_buckets", -1, low=-1)),
            max_relative_positions=most if most > 0 else usual["max_position_embeddings"],
            own_distances=first,
            legacy=fields.boolean("legacy", True),
        )
        return encoder.finished(config, fields, ("conv_act", "conv_groups"))

    def to_hf(self) -> ConfigJson:
        """A config.json."""
        own: ConfigJson = {"relative_attention": True, "max_relative_positions": self.max_relative_positions}
        own |= {"legacy": self.legacy, "position_biased_input": False, "pos_att_type": ["p2c", "c2p"]}
        if not self.own_distances:
            own |= {"share_att_key": True, "norm_rel_ebd": "layer_norm"}
            own["position_buckets"] = self.position_buckets or -1
        return encoder.encoder_to_hf(self, _CLASSES[self.model_type], names={}, **own)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    D = config.hidden_size
    tree = {name: leaf for name, leaf in encoder.spec(config).items() if name != "embed_positions"}
    tree["relative_embeddings"] = embedding(2 * config.span, D, config.initializer_range, axis="bucket")
    if not config.own_distances:
        return tree | layer_norm_leaves("relative_norm", D, "embed")
    for layer in tree["layers"]:
        own = {name: leaf for name, leaf in layer["attention"].items() if name != "k_bias"}
        layer["attention"] = own | {f"distance_{name}": own[name] for name in ("q_proj", "q_bias", "k_proj")}
    return tree


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk, or its rows in each head's block of in_proj}; a model without a head has
    no prefix there."""
    prefix = "" if config.head == "none" else "deberta."
    names = encoder_storage.bert_names(prefix) | _HEADS[config.head]
    long = _OWN if config.own_distances else {"q": "query_proj", "k": "key_proj", "v": "value_proj"}
    names |= {f"attention.{name}": f"{prefix}encoder.layer.{{}}.attention.self.{named}" for name, named in long.items()}
    if config.head == "masked_lm" and not config.legacy:
        names |= {"head.dense": f"{_NEWER}.dense", "head.norm": f"{_NEWER}.LayerNorm", "lm_head_bias": f"{_NEWER}.bias"}
    names["relative_embeddings"] = f"{prefix}encoder.rel_embeddings"
    names["relative_norm"] = f"{prefix}encoder.LayerNorm"
    stored = encoder_storage.encoder_names(config, names)
    return {path: _stored(path, name, config) for path, name in stored.items()}


def _stored(path: str, name: str, config: Config) -> Stored:
    """The name on disk, without an ending for a bias that is no module's; rows of queries, keys and values in one."""
    where, H, heads = path.rpartition(".")[2], config.head_dim, config.num_attention_heads
    if config.own_distances and where in ("q_bias", "v_bias"):
        return name.removesuffix(".bias").replace("in_proj", where)
    if name.endswith(".in_proj.weight"):
        place = "qkv".index(where[0]) * H
        return TensorSlice(name, place, place + H, 3 * heads * H, groups=heads)
    return name


def leftovers(config: Config) -> tuple[str, ...]:
    """Buffers of older files, the heads of pre-training that the config's is none of, and the head's bias once more."""
    buffers = (r"(deberta\.)?embeddings\.position_ids", r"mask_predictions\..*", r"cls\.predictions\.decoder\.bias")
    return buffers if config.head == "masked_lm" else (*buffers, r"lm_predictions\..*", r"cls\.predictions\..*")


def embed(params: Tree, inputs: Tree, /, *, config: Config) -> Tensor:
    """x [B, S, D]: the norm of the sum of token (or given) embeddings and those of "token_types", 0 by default."""
    x = embed_tokens(params["embed_tokens"], inputs)
    return encoder.embed_types(params, x, inputs if isinstance(inputs, Mapping) else {}, config)


def shared(params: Tree, inputs: Mapping[str, Any], /, *, config: Config) -> Tree:
    """The tensors that all layers read: {"bias"}, the embeddings of distances. ValueError for bare tokens."""
    if "positions" not in inputs:
        raise ValueError(
            "DeBERTa's scores depend on distances, so it needs the dict of inputs that `prepare` makes, with tokens "
            "and positions; bare token ids or vectors do not say where they stand."
        )
    table, positions = params["relative_embeddings"], inputs["positions"]
    if "relative_norm" in params:
        table = layer_norm(table, params["relative_norm"], params["relative_norm_bias"], eps=config.layer_norm_eps)
    most, logarithmic = config.max_relative_positions, config.position_buckets > 0
    rows = constants(rows_of_distances(config.span, most, logarithmic=logarithmic), torch.int64, table.device)
    bias = DistanceEmbeddings(table, rows, positions, positions)
    if "rng" in inputs and config.dropout.embedding:
        bias = bias.with_noise(inputs["rng"], inputs.get("valid"))
    return {"bias": bias}


def classify(params: Tree, x: Tensor, documents: Documents, /, *, config: Config) -> Tensor:
    """Logits [N, labels] of each document's first token."""
    return encoder.classify_with(F.gelu, params, x, documents)


_BASE: ConfigJson = {
    "architectures": ["DebertaV2ForMaskedLM"],
    "model_type": "deberta-v2",
    "vocab_size": 128100,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "relative_attention": True,
    "position_buckets": 256,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": "p2c|c2p",
    "position_biased_input": False,
}
_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_XSMALL = {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536}
_FIRST: ConfigJson = {
    "architectures": ["DebertaForMaskedLM"],
    "model_type": "deberta",
    "vocab_size": 50265,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "relative_attention": True,
    "pos_att_type": "c2p|p2c",
    "position_biased_input": False,
}
PRESETS = {
    "deberta-base": _FIRST,
    "deberta-large": _FIRST | _LARGE,
    "deberta-xlarge": _FIRST | _LARGE | {"num_hidden_layers": 48},
    "deberta-v3-xsmall": _BASE | _XSMALL,
    "deberta-v3-small": _BASE | {"num_hidden_layers": 6},
    "deberta-v3-base": _BASE,
    "deberta-v3-large": _BASE | _LARGE,
    "mdeberta-v3-base": _BASE | {"vocab_size": 251000},
}
