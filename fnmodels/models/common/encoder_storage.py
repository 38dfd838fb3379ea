"""Names on disk of BERT's parameters and those of its relatives."""

import re
from collections.abc import Mapping
from typing import Any

from fnmodels.tree import flatten

from .registry import family_of
from .storage import StoredNames, fuse

ROBERTA_HEADS: dict[str, dict[str, str]] = {
    "masked_lm": {
        "head.dense": "lm_head.dense",
        "head.norm": "lm_head.layer_norm",
        "lm_head": "lm_head.decoder",
        "lm_head_bias": "lm_head.bias",
    },
    "classification": {"head.dense": "classifier.dense", "head.score": "classifier.out_proj"},
    "tokens": {"head.score": "classifier"},
    "question_answering": {"head.score": "qa_outputs"},
    "none": {},
}


def roberta_leftovers(prefix: str, config: Any) -> tuple[str, ...]:
    """Patterns of buffers of older files, of the pooler, which the heads do not read, and of the head's bias again.

    prefix: of the model in files of one with a head, such as "roberta.".
    """
    prefix = re.escape(prefix)
    buffers = (rf"({prefix})?embeddings\.position_ids",)
    unread = (rf"{prefix}pooler\.dense\.(weight|bias)", r"lm_head\.decoder\.bias")
    return buffers if config.head == "none" else (*buffers, *unread)


def bert_names(prefix: str) -> dict[str, str]:
    """The names, as for `encoder_names`, of everything but the heads in files of BERT, with the prefix of its model."""
    layer = f"{prefix}encoder.layer.{{}}."
    return {
        "embed_tokens": f"{prefix}embeddings.word_embeddings",
        "embed_positions": f"{prefix}embeddings.position_embeddings",
        "embed_types": f"{prefix}embeddings.token_type_embeddings",
        "embed_norm": f"{prefix}embeddings.LayerNorm",
        "attention.q": f"{layer}attention.self.query",
        "attention.k": f"{layer}attention.self.key",
        "attention.v": f"{layer}attention.self.value",
        "attention.o": f"{layer}attention.output.dense",
        "post_attention_layernorm": f"{layer}attention.output.LayerNorm",
        "mlp.up": f"{layer}intermediate.dense",
        "mlp.down": f"{layer}output.dense",
        "post_feedforward_layernorm": f"{layer}output.LayerNorm",
        "embed_projection.weight": f"{prefix}embeddings_project.weight",
        "embed_projection.bias": f"{prefix}embeddings_project.bias",
        "pooler.dense": f"{prefix}pooler.dense",
    }


def encoder_names(config: Any, names: Mapping[str, str]) -> dict[str, str]:
    """{path of a parameter: its name on disk}.

    names: {path within a layer, or outside: the name on disk, with {} for the layer}. "attention.q" stands for q_proj
    and q_bias, another path for a parameter and its bias; without .weight or .bias at its end, a name gets one.
    """
    names_on_disk = {}
    for path in flatten(family_of(config).spec(config)):
        parts = path.split(".")
        layer, inner = (parts[1], ".".join(parts[2:])) if parts[0] == "layers" else ("", path)
        stem = inner.removesuffix("_proj").removesuffix("_bias")
        name = names[inner] if inner in names else names[stem]
        if not name.endswith((".weight", ".bias")):
            name += ".bias" if inner.endswith("_bias") else ".weight"
        names_on_disk[path] = name.format(layer)
    return names_on_disk


def fused_names(config: Any, names: Mapping[str, str]) -> StoredNames:
    """As `encoder_names`, where parameters of one name are rows of one tensor, in their order."""
    names_on_disk: StoredNames = dict(encoder_names(config, names))
    rows: dict[str, dict[str, int]] = {}
    for path, leaf in flatten(family_of(config).spec(config)).items():
        rows.setdefault(names_on_disk[path], {})[path] = leaf.shape[0]
    for name, parts in rows.items():
        names_on_disk |= fuse(name, parts) if len(parts) > 1 else {}
    return names_on_disk
