"""ViT (arXiv 2010.11929), also with DINO's weights: learned positions, a class token, and a pooler or a classifier.

`forward` returns the hidden states [B, S, D] after the last norm; `features` the pooler's output of each image.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnmodels.inputs.documents import Documents
from fnmodels.models.common import vision
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import bias, weight
from fnmodels.models.common.vision import attention_masks, block, freqs_cis, kinds, unembed  # noqa: F401
from fnmodels.models.vision.common import position_table
from fnmodels.ops.linear import linear
from fnmodels.tree import Tree

MODEL_TYPES = ("vit",)
TRAITS = Traits(
    inputs="patches",
    causal=False,
    optional={"pooler": "pooler"},  # files of a model saved without one
    in_memory={
        r"encoder\.layer\.": "layers.",
        r"\.attention\.attention\.query\.": ".attention.q_proj.",
        r"\.attention\.attention\.key\.": ".attention.k_proj.",
        r"\.attention\.attention\.value\.": ".attention.v_proj.",
        r"\.attention\.output\.dense\.": ".attention.o_proj.",
        r"\.intermediate\.dense\.": ".mlp.fc1.",
        r"\.output\.dense\.": ".mlp.fc2.",
    },
)
PRESETS = {"vit-base-patch16-224": {"model_type": "vit", "architectures": ["ViTModel"]}}

batch_inputs = functools.partial(position_table.table_inputs, resample=position_table.bicubic)

_LAYER = {
    "input_layernorm": "layernorm_before",
    "attention.q_proj": "attention.attention.query",
    "attention.k_proj": "attention.attention.key",
    "attention.v_proj": "attention.attention.value",
    "attention.o_proj": "attention.output.dense",
    "post_attention_layernorm": "layernorm_after",
    "mlp.up_proj": "intermediate.dense",
    "mlp.down_proj": "output.dense",
}


@dataclass(frozen=True, kw_only=True)
class Config(vision.VisionConfig):
    """Sizes and switches. pooler: 1 with a pooler (tanh), 0 without."""

    layer_norm_eps: float = 1e-12
    qkv_bias: bool = True
    pooler: int = 1

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        usual = vision.vision_fields(fields, MODEL_TYPES, eps=1e-12)
        fields.expect("pooler_output_size", usual["hidden_size"])
        fields.expect("pooler_act", "tanh")
        head = vision.head_of(fields, "ViT")
        config = Config(
            **usual,
            **head,
            qkv_bias=fields.boolean("qkv_bias", True),
            pooler=int(head.get("head") != "classification"),
        )
        object.__setattr__(config, "extra", vision.kept_fields(fields, ("encoder_stride",)))
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        return vision.vision_to_hf(self, "ViT", "qkv_bias")


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in], of the patches [D, C, p, p]."""
    D, std = config.hidden_size, config.initializer_range
    tree: Tree = {"class_token": vision.vector(D, std, 1, 1), **vision.patch_leaves(config)}
    tree["embed_positions"] = vision.vector(D, std, 1, 1 + config.side**2, axis="position")
    tree["layers"] = [vision.vision_layer(config, qkv_bias=config.qkv_bias) for _ in range(config.num_hidden_layers)]
    tree |= vision.last_norm(config) | vision.head_leaves(config, D)
    pooler = {"proj": weight((D, D), ("pooled", "embed"), std), "bias": bias(D, "pooled")}
    return tree | ({"pooler": pooler} if config.pooler else {})


def hf_names(config: Config) -> dict[str, str]:
    """{path of a parameter: its name on disk}."""
    at = "vit." if config.head == "classification" else ""
    names = {"class_token": f"{at}embeddings.cls_token", "embed_positions": f"{at}embeddings.position_embeddings"}
    names |= vision.weight_and_bias("patch_proj", f"{at}embeddings.patch_embeddings.projection")
    names |= vision.layer_names(config, f"{at}encoder.layer.", _LAYER)
    names |= vision.weight_and_bias("norm", f"{at}layernorm") | vision.weight_and_bias("classifier", "classifier")
    names |= {"pooler.proj": "pooler.dense.weight", "pooler.bias": "pooler.dense.bias"}
    return vision.of_spec(spec(config), names)


def embed(params: Tree, inputs: Any, /, *, config: Config) -> Tensor:
    """x [B, S, D]: patches, class tokens and their positions."""
    placed = position_table.table_positions(params["embed_positions"][0], inputs)
    return vision.embed_patches(params, inputs, config=config) + placed


def features(params: Tree, hidden: Tensor, documents: Documents, /, *, config: Config) -> Tensor:
    """The pooler's output of each image, [N, D]. hidden: what `forward` returns; documents: the images."""
    return torch.tanh(
        linear(vision.class_tokens(hidden, documents), params["pooler"]["proj"], params["pooler"]["bias"])
    )


def classify(params: Tree, x: Tensor, documents: Documents, /, *, config: Config) -> Tensor:
    """Logits of each image, [N, labels], from hidden states x [B, S, D] before the last norm."""
    return vision.classified(params, unembed(params, vision.class_tokens(x, documents), config=config))
