"""LLaVA 1.5 (arXiv 2310.03744): CLIP's patches through a two-layer MLP into the embeddings of any text model.

VipLLaVA (arXiv 2312.00784) concatenates the patches of several layers, with a LayerNorm before the MLP.
Video-LLaVA (arXiv 2311.10122) has a second tower, params["video"], for frames of videos, whose class tokens are
features too: `video_tower` in place of `tower`, and `image_places(tokens, config.video_token, image_ids > 0)`.
The parameters are {"text", "vision", "projector"}. The last layers and norms of the tower that the config's feature
layer does not reach are kept, since files hold them.

seen, tower_config = llava.tower(params, config)
x = fnmodels.hidden(seen, *fnmodels.prepare(tower_config, patches, positions=..., segment_ids=...), config=tower_config)
inputs, masks, freqs_cis = fnmodels.prepare(config.text, tokens, positions=..., segment_ids=...)
places = llava.image_places(tokens, config.image_token, patches_read)
inputs = llava.with_images(params, inputs, llava.project(params, x), places, config=config)
logits = fnmodels.forward(params["text"], inputs, masks, freqs_cis, config=config.text)
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fnmodels.errors import UnsupportedError
from fnmodels.inputs.image_places import cells, gather_cells, image_places  # noqa: F401
from fnmodels.inputs.images import center_crop, shortest_edge
from fnmodels.models.common.config_json import ConfigJson, Fields
from fnmodels.models.common.family import Traits
from fnmodels.models.common.spec import layer_norm_leaves
from fnmodels.models.common.storage import StoredNames
from fnmodels.models.common.vision import weight_and_bias
from fnmodels.models.vision import clip_vision
from fnmodels.models.vision.common import two_towers
from fnmodels.models.vision.common.two_towers import kinds, towers  # noqa: F401
from fnmodels.models.vision_language.common import image_prompts, vision_language
from fnmodels.models.vision_language.common.image_prompts import ImageSettings, Name, placeholder  # noqa: F401
from fnmodels.models.vision_language.common.vision_language import with_images  # noqa: F401
from fnmodels.ops.norm import layer_norm
from fnmodels.run_params import with_run
from fnmodels.tree import Tree

# The class of the model, and what `vision_feature_layer` is by default.
_TYPES: dict[str, tuple[str, Any]] = {
    "llava": ("LlavaForConditionalGeneration", -2),
    "video_llava": ("VideoLlavaForConditionalGeneration", -2),
    "vipllava": ("VipLlavaForConditionalGeneration", [-2, -5, -8, -11, 6]),
}
MODEL_TYPES = tuple(_TYPES)
tower, taps = vision_language.cut_tower, vision_language.layer_taps
TRAITS = Traits(
    leftovers=(r"(vision|image|video)_tower\.(vision_model\.)?embeddings\.position_ids",),
    # transformers 5 writes towers without the component that published files have.
    resaved={
        r"(?:model\.)?((?:image|video)_tower)\.((?!vision_model\.).*)": r"\1.vision_model.\2",
        **vision_language.IN_MEMORY_WITHOUT_VISION_MODEL,
    },
    in_memory={r"^(image|video)_tower\.(vision_model\.)?": r"model.\1_tower.", **vision_language.MODULES},
)
_LLAMA = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
# config.json of llava-hf/llava-1.5-7b-hf, llava-hf/vip-llava-7b-hf and LanguageBind/Video-LLaVA-7B-hf.
_VICUNA = {"model_type": "llama", "vocab_size": 32064, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, **_LLAMA}
_CLIP = {"model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
_CLIP |= {"num_attention_heads": 16, "image_size": 336, "patch_size": 14}
_7B: ConfigJson = {"image_token_index": 32000, "text_config": _VICUNA, "vision_config": _CLIP}
PRESETS: dict[str, ConfigJson] = {
    "llava-1.5-7b": _7B | {"model_type": "llava"},
    "vip-llava-7b": _7B | {"model_type": "vipllava"},
    "video-llava-7b": _7B | {"model_type": "video_llava", "vision_config": _CLIP | {"image_size": 224}},
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """The parts. image_token: the id of the tokens that features replace. projector_bias: whether the MLP has biases.

    feature_layers: after how many layers of the tower the hidden states are read. norm_eps: of the norm before the MLP,
    0: there is none. video_token: as image_token, of a model with a tower for videos.
    """

    text: Any
    vision: clip_vision.Config
    image_token: int
    feature_layers: tuple[int, ...]
    projector_bias: bool = True
    norm_eps: float = 0.0
    video_token: int | None = None
    # kept for saving only
    model_type: str = field(default="llava", compare=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json; raises ConfigError or UnsupportedError with the field's name."""
        outer = Fields(values)
        model_type = outer.choice("model_type", MODEL_TYPES)
        outer.expect("projector_hidden_act", "gelu")
        outer.expect("vision_feature_select_strategy", "default")
        outer.expect("tie_word_embeddings", False, True)  # true is transformers 4's default, which reads the text's
        # Old files leave out what equals the defaults of Llama.
        outer.take("vocab_size", None)  # compared below
        text = vision_language.text_config(outer, "llama", _LLAMA)
        for name in ("vocab_size", "_vocab_size"):
            outer.expect(name, text.vocab_size, 32000)  # the latter is the default in older releases, for any text
        if text.tie_word_embeddings:
            raise UnsupportedError(f"{outer.where}: 'tie_word_embeddings' of text_config is True; supported is False.")
        vision = clip_vision.Config.from_hf(two_towers.tower_fields(outer, "vision_config", "clip_vision_model"))
        vip, layers = model_type == "vipllava", outer.take("vision_feature_layer", _TYPES[model_type][1])
        if vip and "vision_feature_layers" in values:  # in older files
            layers = outer.take("vision_feature_layers")
        config = Config(
            text=text,
            vision=vision,
            image_token=outer.integer("image_token_index", 32000, low=0),
            feature_layers=vision_language.feature_layers(layers, vision.num_hidden_layers),
            projector_bias=vip or outer.boolean("multimodal_projector_bias", True),
            norm_eps=outer.number("projector_layernorm_eps", 1e-5) if vip else 0.0,
            video_token=outer.integer("video_token_index", 32001, low=0) if model_type == "video_llava" else None,
            model_type=model_type,
        )
        lengths = ("image_seq_length", "video_seq_length")  # for the processor
        object.__setattr__(config, "extra", vision_language.kept(outer, ignored=lengths))
        return config

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect."""
        layers = [count - self.vision.num_hidden_layers - 1 for count in self.feature_layers]
        fields: ConfigJson = {"image_token_index": self.image_token, "image_seq_length": self.vision.side**2}
        fields |= {"vision_feature_layer": layers if len(layers) > 1 else layers[0], "projector_hidden_act": "gelu"}
        if self.model_type == "vipllava":
            fields["projector_layernorm_eps"] = self.norm_eps
        else:
            fields |= {"vision_feature_select_strategy": "default", "multimodal_projector_bias": self.projector_bias}
        if self.video_token is not None:
            fields["video_token_index"] = self.video_token
        return vision_language.to_hf(self, _TYPES[self.model_type][0], **fields, tie_word_embeddings=False)


def spec(config: Config) -> Tree:
    """The parameters: those of both parts, and the projector's weights [out, in]."""
    narrow, wide = config.vision.hidden_size * len(config.feature_layers), config.text.hidden_size
    projector = vision_language.mlp_leaves(narrow, wide, config.text.initializer_range, biases=config.projector_bias)
    projector |= layer_norm_leaves("norm", narrow, "embed") if config.norm_eps else {}
    video = {} if config.video_token is None else {"video": clip_vision.spec(config.vision)}
    return two_towers.towers_spec(config) | video | {"projector": projector}


def hf_names(config: Config) -> StoredNames:
    """{path of a parameter: its name on disk}."""
    images = "vision_tower." if config.video_token is None else "image_tower."
    names = vision_language.part_names(config, text="language_model.", vision=images)
    if config.video_token is not None:
        names |= two_towers.with_prefix(clip_vision.hf_names(config.vision), "video", "video_tower.")
    norms = weight_and_bias("projector.norm", "multi_modal_projector.projector_layernorm")
    return names | vision_language.mlp_names(config.projector_bias) | (norms if config.norm_eps else {})


def project(params: Tree, x: Tensor, /, *, norm_eps: float = 1e-5) -> Tensor:
    """The tower's hidden states [rows, slots, D] in the text's width: [rows, slots, text's D].

    x: of all `config.feature_layers`, concatenated. norm_eps: that of the config, where the projector has a norm.
    """
    weights = params["projector"]
    x = layer_norm(x, weights["norm"], weights["norm_bias"], eps=norm_eps) if "norm" in weights else x
    return vision_language.mlp(weights, x)


def video_tower(params: Tree, config: Config) -> tuple[Tree, Any]:
    """As `tower`, for the frames of videos."""
    return tower(with_run(params, {**params, "vision": params["video"]}), config)


def cell_side(config: Config) -> int:
    """The patches of a side of a cell, which is one feature."""
    return 1


def features_of(
    params: Tree, x: Tensor, tapped: Mapping[str, Tensor], places: Tensor, /, *, config: Config
) -> tuple[Tensor, ...]:
    """`project` as `fnmodels.image_text` calls it, as a tuple whose first features replace embeddings."""
    x = vision_language.of_layers(x, tapped, config)
    return (project(params, gather_cells(x, places)[None, :, 0], norm_eps=config.norm_eps),)


def read_image(image: Tensor, settings: ImageSettings, name: Name, *, config: Config) -> tuple[list[Tensor], str]:
    """(images for the tower, text in place of the placeholder), see `common.image_prompts`."""
    square, least = config.vision.image_size, 4 * min(image.shape[1:])
    edge = image_prompts.number(settings, "size", "shortest_edge", square, most=4096)
    image_prompts.expect_side(settings, "crop_size", "height", square)
    image = center_crop(image, (min(image.shape[1], least), min(image.shape[2], least)))  # what is cut off below anyway
    picture = center_crop(image_prompts.resized(image, shortest_edge(image, edge), settings), (square, square))
    return [picture], name(config.image_token) * (square // config.vision.patch_size) ** 2
