"""DINOv2 (arXiv 2304.07193): ViT with layer scales, a gated MLP in the largest model, and maybe registers (2309.16588).

`forward` returns the hidden states [B, S, D] after the last norm, `features` that of each image's class token.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnmodels.inputs.documents import Documents
from fnmodels.models.common import vision
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.family import Traits
from fnmodels.models.common.storage import Stored, fuse
from fnmodels.models.common.vision import attention_masks, block, freqs_cis, kinds, unembed  # noqa: F401
from fnmodels.models.vision.common import position_table
from fnmodels.tree import Tree, flatten

MODEL_TYPES = ("dinov2", "dinov2_with_registers")
TRAITS = Traits(
    inputs="patches",
    causal=False,
    in_memory={
        r"\.attention\.attention\.query\.": ".attention.q_proj.",
        r"\.attention\.attention\.key\.": ".attention.k_proj.",
        r"\.attention\.attention\.value\.": ".attention.v_proj.",
        r"\.attention\.output\.dense\.": ".attention.o_proj.",
        r"\.weights_in\.": ".{leaf}_proj.",
        r"\.weights_out\.": ".down_proj.",
    },
)
_SIZES = {"image_size": 518, "patch_size": 14}
PRESETS = {
    "dinov2-base": {"model_type": "dinov2", "architectures": ["Dinov2Model"], **_SIZES},
    "dinov2-with-registers-base": _SIZES
    | {"model_type": "dinov2_with_registers", "architectures": ["Dinov2WithRegistersModel"], "num_register_tokens": 4},
}

_LAYER = {
    "input_layernorm": "norm1",
    "attention.q_proj": "attention.attention.query",
    "attention.k_proj": "attention.attention.key",
    "attention.v_proj": "attention.attention.value",
    "attention.o_proj": "attention.output.dense",
    "post_attention_layernorm": "norm2",
}
# Settings of training, and of backbones that other models are made of.
_IGNORED = ("drop_path_rate", "apply_layernorm", "reshape_hidden_states", "out_features", "out_indices", "stage_names")


@dataclass(frozen=True, kw_only=True)
class Config(vision.VisionConfig):
    """Sizes and switches. intermediate_size follows from mlp_ratio and use_swiglu_ffn."""

    qkv_bias: bool = True
    mlp_ratio: int = 4
    use_swiglu_ffn: bool = False
    use_mask_token: bool = True
    layerscale_value: float = 1.0
    num_register_tokens: int = 0

    @property
    def special_tokens(self) -> int:
        """The class token and the registers."""
        return 1 + self.num_register_tokens

    @property
    def classes(self) -> str:
        """The prefix of the reference's class names."""
        return "Dinov2WithRegisters" if self.num_register_tokens else "Dinov2"

    @property
    def mlp_act(self) -> str:
        """The activation of the MLP: hidden_act, which the gated one does not read."""
        return "silu" if self.use_swiglu_ffn else self.hidden_act

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        registers = fields.choice("model_type", MODEL_TYPES) == "dinov2_with_registers"
        usual = vision.vision_fields(fields, MODEL_TYPES, eps=1e-6, patch=16 if registers else 14, inner=_inner)
        config = Config(
            **usual,
            **vision.head_of(fields, "Dinov2WithRegisters" if registers else "Dinov2"),
            num_register_tokens=fields.integer("num_register_tokens", 4) if registers else 0,
            **fields.plain(qkv_bias=True, mlp_ratio=4, use_swiglu_ffn=False),
            use_mask_token=registers or fields.boolean("use_mask_token", True),
            layerscale_value=fields.number("layerscale_value", 1.0, above=-1.0),
        )
        object.__setattr__(config, "extra", vision.kept_fields(fields, _IGNORED))
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        own = "num_register_tokens" if self.num_register_tokens else "use_mask_token"
        names = ("qkv_bias", "mlp_ratio", "use_swiglu_ffn", "layerscale_value", own)
        return vision.vision_to_hf(self, self.classes, *names, intermediate_size=None)


def _inner(fields: Fields, hidden: int) -> int:
    inner = hidden * fields.integer("mlp_ratio", 4)
    return (int(inner * 2 / 3) + 7) // 8 * 8 if fields.boolean("use_swiglu_ffn", False) else inner


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in], of the patches [D, C, p, p]."""
    D, std = config.hidden_size, config.initializer_range
    tree: Tree = {"class_token": vision.vector(D, std, 1, 1), **vision.patch_leaves(config)}
    tree |= {"mask_token": vision.vector(D, std, 1)} if config.use_mask_token else {}
    if config.num_register_tokens:
        tree["register_tokens"] = vision.vector(D, std, 1, config.num_register_tokens)
    tree["embed_positions"] = vision.vector(D, std, 1, 1 + config.side**2, axis="position")
    gated, scale = config.use_swiglu_ffn, config.layerscale_value
    layer = vision.vision_layer(config, qkv_bias=config.qkv_bias, gated=gated, scale=scale)
    tree["layers"] = [layer for _ in range(config.num_hidden_layers)]
    return tree | vision.last_norm(config) | vision.head_leaves(config, 2 * D)


def hf_names(config: Config) -> dict[str, Stored]:
    """{path of a parameter: its name on disk}."""
    base = "dinov2_with_registers." if config.num_register_tokens else "dinov2."
    at, inner = base if config.head == "classification" else "", config.intermediate_size
    names: dict[str, Stored] = {f"{n}_token": f"{at}embeddings.{d}_token" for n, d in (("class", "cls"), ("mask",) * 2)}
    names |= {"embed_positions": f"{at}embeddings.position_embeddings"} | vision.scale_names(
        config, f"{at}encoder.layer."
    )
    names["register_tokens"] = f"{at}embeddings.register_tokens"
    names |= vision.weight_and_bias("patch_proj", f"{at}embeddings.patch_embeddings.projection")
    ends = ("weights_in", "weights_out") if config.use_swiglu_ffn else ("fc1", "fc2")
    layer = _LAYER | {"mlp.up_proj": f"mlp.{ends[0]}", "mlp.down_proj": f"mlp.{ends[1]}"}
    names |= vision.layer_names(config, f"{at}encoder.layer.", layer)
    for i in range(config.num_hidden_layers) if config.use_swiglu_ffn else ():
        for disk, ours in (("weight", "proj"), ("bias", "bias")):
            rows = {f"layers.{i}.mlp.{name}_{ours}": inner for name in ("gate", "up")}
            names |= fuse(f"{at}encoder.layer.{i}.mlp.weights_in.{disk}", rows)
    names |= vision.weight_and_bias("norm", f"{at}layernorm") | vision.weight_and_bias("classifier", "classifier")
    return {path: names[path] for path in flatten(spec(config))}


def batch_inputs(config: Config, positions: Tensor) -> dict[str, Tensor]:
    """The entries of the position table that each patch reads; see `position_table.table_inputs`."""
    resample = position_table.bicubic_antialias if config.num_register_tokens else position_table.bicubic
    return position_table.table_inputs(config, positions, resample=resample)


def embed(params: Tree, inputs: Any, /, *, config: Config) -> Tensor:
    """x [B, S, D]: patches, class tokens and their positions."""
    placed = position_table.table_positions(params["embed_positions"][0], inputs)
    return vision.embed_patches(params, inputs, config=config) + placed


def features(params: Tree, hidden: Tensor, documents: Documents, /, *, config: Config) -> Tensor:
    """Each image's class token, [N, D]. hidden: what `forward` returns; documents: the images."""
    return vision.class_tokens(hidden, documents)


def classify(params: Tree, x: Tensor, documents: Documents, /, *, config: Config) -> Tensor:
    """Logits of each image, [N, labels], from hidden states x [B, S, D] before the last norm."""
    normed = unembed(params, x, config=config)
    both = (vision.class_tokens(normed, documents), vision.mean_of_patches(normed, documents, config.special_tokens))
    return vision.classified(params, torch.cat(both, -1))
