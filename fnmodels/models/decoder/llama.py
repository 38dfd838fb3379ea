"""Llama 2 to 3.3 (arXiv 2307.09288, 2407.21783), Mistral, Qwen 2 and 3, SmolLM 3, Seed-OSS, EXAONE 3, InternLM 3,
IQuest-Coder, Code World Model.

A pre-norm decoder with grouped-query attention, half-layout rotary embedding and a gated MLP. Members differ in biases,
query and key norms (Qwen 3), sliding-window layers, and layers without rotary embedding (NoPE; SmolLM 3).
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.models.common import decoder
from fnmodels.models.common.config_json import ConfigJson, Fields, renamed
from fnmodels.models.common.context import Context, with_context
from fnmodels.models.common.decoder import attention_masks, embed, freqs_cis, kinds, unembed  # noqa: F401
from fnmodels.models.common.family import Traits, parsed
from fnmodels.models.common.rope_config import sections_to_hf, split_sections
from fnmodels.models.common.spec import decoder_leaves, head_norms, layer_leaves, usual_attention, usual_mlp
from fnmodels.ops import apply_rotary, gated_mlp, project_out, project_qkv, rms_norm
from fnmodels.tree import Tree

MODEL_TYPES = (
    *("llama", "mistral", "ministral", "qwen2", "qwen3", "smollm3", "seed_oss"),
    *("exaone", "internlm3", "iquestcoder", "cwm"),
)
TRAITS = Traits(
    dropout_of={"seed_oss": {"attention_dropout": ("weights",), "residual_dropout": ("attention", "mlp")}},
    kinds=("full", "sliding", "full_nope", "sliding_nope"),
    leftovers=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),  # a buffer in older files
    classes=dict.fromkeys(("exaone", "internlm3", "iquestcoder"), "LlamaForCausalLM"),
)

# num_key_value_heads where the field is absent; null means as many as query heads.
_KV_HEADS = {"mistral": 8, "ministral": 8, "qwen2": 32, "qwen3": 32, "smollm3": 4, "seed_oss": 8}
_KV_HEADS |= {"exaone": 8, "internlm3": 2, "iquestcoder": 8, "cwm": 8}
_ARCHITECTURES = {"llama": "Llama", "mistral": "Mistral", "ministral": "Ministral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
_ARCHITECTURES |= {"smollm3": "SmolLM3", "seed_oss": "SeedOss", "exaone": "Exaone", "internlm3": "InternLM3"}
_ARCHITECTURES |= {"iquestcoder": "IQuestCoder", "cwm": "Cwm"}
_POSITIONS = {"llama": 2048, "mistral": 131072, "ministral": 131072, "seed_oss": 524288, "exaone": 4096}
_POSITIONS |= {"iquestcoder": 131072, "cwm": 131072}
_THETA = {"smollm3": 2e6, "exaone": 5e5, "cwm": 1e6}
_HEAD_DIM = {"qwen3": 128, "internlm3": 128, "iquestcoder": 128, "cwm": 128}
_EPS = dict.fromkeys(("exaone", "internlm3", "iquestcoder", "cwm"), 1e-5)
# Model types with the field attention_bias, and with the field mlp_bias.
_ATTENTION_BIAS = ("llama", "qwen3", "smollm3", "seed_oss", "exaone", "internlm3", "iquestcoder")
_MLP_BIAS = ("llama", "smollm3", "seed_oss", "exaone", "internlm3", "iquestcoder", "cwm")
_NO_WINDOW = ("llama", "seed_oss", "exaone", "internlm3", "iquestcoder")
# Their files' names of fields.
_RENAMED = {
    "exaone": {
        "num_layers": "num_hidden_layers",
        "layer_norm_epsilon": "rms_norm_eps",
        "activation_function": "hidden_act",
    },
    "internlm3": {"qkv_bias": "attention_bias", "bias": "mlp_bias"},
}
# The parts of names on disk that differ in EXAONE's files.
_EXAONE_ON_DISK = {
    "model.embed_tokens.": "transformer.wte.",
    "model.layers.": "transformer.h.",
    "model.norm.": "transformer.ln_f.",
    ".self_attn.": ".attn.attention.",
    ".o_proj.": ".out_proj.",
    ".input_layernorm.": ".ln_1.",
    ".post_attention_layernorm.": ".ln_2.",
    ".gate_proj.": ".c_fc_0.",
    ".up_proj.": ".c_fc_1.",
    ".down_proj.": ".c_proj.",
}
_ROPE = ("rope_parameters", "rope_scaling", "rope_theta")
_CWM_ROPE = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_CWM_ROPE |= {"original_max_position_embeddings": 8192, "rope_theta": 1e6}


@dataclass(frozen=True)
class Config(decoder.BaseConfig):
    """Sizes and switches."""

    rms_norm_eps: float = 1e-5
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    # rotary frequencies of time, height and width, one for text: of the texts of Qwen's VL models and PaddleOCR-VL
    mrope_section: tuple[int, ...] = ()
    mrope_interleaved: bool = True

    @staticmethod
    def from_hf(values: ConfigJson) -> "Config":
        """From a config.json of any of MODEL_TYPES; raises ConfigError or UnsupportedError with the field's name."""
        fields = Fields(values)
        model_type = fields.choice("model_type", MODEL_TYPES)
        fields = renamed(fields, _RENAMED.get(model_type, {}))
        if model_type == "cwm" and not any(fields.take(name, None) for name in _ROPE):
            fields = Fields({**fields.values, "rope_parameters": _CWM_ROPE}, fields.where)
        if model_type == "seed_oss":
            fields = Fields({"attention_dropout": 0.1, "residual_dropout": 0.1, **fields.values}, fields.where)
        sections, interleaved = tuple[int, ...](), True
        if model_type in ("llama", "qwen2", "qwen3"):
            fields, sections, interleaved = split_sections(fields, interleaved=model_type == "qwen3")
        usual = decoder.base_fields(
            fields,
            MODEL_TYPES,
            theta=_THETA.get(model_type, 1e4),
            max_positions=_POSITIONS.get(model_type, 32768),
            tied=model_type == "smollm3",
            kv_heads=_KV_HEADS.get(model_type, 0),
            head_dim=128 if model_type == "seed_oss" and "head_dim" not in values else _HEAD_DIM.get(model_type, 0),
        )
        for name in ("parallel_residual", "use_parallel_residual"):
            fields.expect(name, False)
        fields.expect("activation", "swiglu")  # in Falcon 3's files, in addition to hidden_act
        seed = model_type == "seed_oss"
        has_bias = model_type in _ATTENTION_BIAS and fields.boolean("attention_bias", seed)
        if model_type in ("mistral", "ministral", "cwm"):
            fields.expect("attention_bias", False)
        if model_type == "internlm3":  # transformers has one switch for both, and no published model differs
            fields.expect("mlp_bias", has_bias)
        if model_type not in _MLP_BIAS:
            fields.expect("mlp_bias", False)
        window, layer_kinds = _layer_kinds(fields, model_type, usual["num_hidden_layers"])
        config = Config(
            **usual,
            rms_norm_eps=fields.number("rms_norm_eps", _EPS.get(model_type, 1e-6)),
            qkv_bias=has_bias or model_type == "qwen2",
            o_bias=fields.boolean("attention_out_bias", False) if seed else has_bias,
            mlp_bias=model_type in _MLP_BIAS and fields.boolean("mlp_bias", False),
            qk_norm=model_type == "qwen3",
            sliding_window=window,
            layer_kinds=layer_kinds,
            mrope_section=sections,
            mrope_interleaved=interleaved,
        )
        return decoder.finished(config, fields)

    def to_hf(self) -> ConfigJson:
        """A config.json in the current dialect. Raises ConfigError where `model_type` has no word for this model."""
        names, own = ["rms_norm_eps", "hidden_act"], dict[str, Any]()
        if self.model_type in _ATTENTION_BIAS:
            own["attention_bias"] = self.qkv_bias
        if self.model_type == "seed_oss":
            own["attention_out_bias"] = self.o_bias
        if self.model_type in _MLP_BIAS:
            names.append("mlp_bias")
        if self.model_type not in _NO_WINDOW:
            names.append("sliding_window")
        slides = [kind.slides for kind in parsed(self.layer_kinds)]
        if self.model_type in ("ministral", "qwen2", "qwen3", "smollm3", "cwm"):
            own["layer_types"] = decoder.layer_types(slides)
        if self.model_type in ("qwen2", "qwen3", "smollm3"):
            own["use_sliding_window"] = any(slides)
        if self.model_type == "smollm3":
            own["no_rope_layers"] = [int(kind.rotates) for kind in parsed(self.layer_kinds)]
        if self.mrope_section:
            own["rope_parameters"] = sections_to_hf(self)
        return decoder.decoder_to_hf(self, f"{_ARCHITECTURES[self.model_type]}ForCausalLM", *names, **own)


def _layer_kinds(fields: Fields, model_type: str, layers: int) -> tuple[int | None, tuple[str, ...]]:
    """(sliding window, the kind of each layer), from explicit lists or the rule of the model type."""
    if model_type in _NO_WINDOW:
        fields.expect("use_sliding_window", False)
        return None, ("full",) * layers
    window = fields.integer("sliding_window", 8192 if model_type == "cwm" else 0, low=0) or None
    if model_type == "cwm":
        slides = decoder.sliding_layers(fields, [i % 4 != 0 for i in range(layers)])
        return window if any(slides) else None, tuple("sliding" if s else "full" for s in slides)
    if model_type in ("mistral", "ministral"):  # absent: 4096, as in the first release; null: none
        window = 4096 if "sliding_window" not in fields.values else window
        slides = [window is not None] * layers
        slides = slides if model_type == "mistral" else decoder.sliding_layers(fields, slides)
        return window if any(slides) else None, tuple("sliding" if s else "full" for s in slides)
    on = fields.boolean("use_sliding_window", False)
    rope = [1] * layers
    if model_type == "smollm3":
        fields.take("max_window_layers", None)  # in its files without effect
        rope = decoder.rotating_layers(fields, fields.take("no_rope_layers", None), layers)
        slides = [on and not r for r in rope]
    else:
        # not compared with `layer_types`: transformers writes its default 28 beside any list and ignores it
        first = fields.integer("max_window_layers", 28, low=0)
        slides = [on and i >= first for i in range(layers)]
    window = window if on else None
    slides = decoder.sliding_layers(fields, slides)
    if any(slides) and window is None:
        raise ConfigError("'layer_types' has sliding layers, but 'sliding_window' is off.")
    found = [("sliding" if s else "full") + ("" if r else "_nope") for s, r in zip(slides, rope, strict=True)]
    return window if any(slides) else None, tuple(found)


def spec(config: Config) -> Tree:
    """The parameters: weights [out, in]."""
    attention = usual_attention(config, qkv_bias=config.qkv_bias, o_bias=config.o_bias)
    attention |= head_norms(config) if config.qk_norm else {}
    layer = layer_leaves(config.hidden_size, attention, usual_mlp(config, biases=config.mlp_bias))
    return decoder_leaves(config, [layer for _ in config.layer_kinds])


def hf_names(config: Config) -> dict[str, str]:
    """{path of a parameter: its name on disk}."""
    names = decoder.hf_names(config)
    for ours, theirs in _EXAONE_ON_DISK.items() if config.model_type == "exaone" else ():
        names = {path: name.replace(ours, theirs) for path, name in names.items()}
    return names


@with_context
def block(layer: Tree, x: Tensor, mask: Any, freqs: Tensor, /, *, config: Config, kind: str, ctx: Context) -> Tensor:
    """One layer: x [B, S, D] -> x."""
    eps, weights = config.rms_norm_eps, layer["attention"]
    q, k, v = project_qkv(weights, rms_norm(x, layer["input_layernorm"], eps=eps), head_dim=config.head_dim)
    if config.qk_norm:
        q, k = rms_norm(q, weights["q_norm"], eps=eps), rms_norm(k, weights["k_norm"], eps=eps)
    q, k = apply_rotary(q, freqs), apply_rotary(k, freqs)
    mixed = ctx.attend(q, k, v, mask, scale=config.head_dim**-0.5)
    x = ctx.tap("middle", x + ctx.tap("attention", project_out(weights, mixed)))
    normed = rms_norm(x, layer["post_attention_layernorm"], eps=eps)
    return x + ctx.tap("mlp", gated_mlp(layer["mlp"], normed, activation=config.hidden_act, tap=ctx.tap))


PRESETS: dict[str, ConfigJson] = {
    "seed-oss-36b": {"model_type": "seed_oss", "vocab_size": 155136, "hidden_size": 5120, "intermediate_size": 27648}
    | {"num_hidden_layers": 64, "num_attention_heads": 80, "rope_theta": 1e7},
    "exaone-3.0-7.8b": {"model_type": "exaone", "vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 14336}
    | {"num_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
    "internlm3-8b": {"model_type": "internlm3", "vocab_size": 128512, "hidden_size": 4096, "intermediate_size": 10240}
    | {"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 2, "rope_theta": 5e7}
    | {"max_position_embeddings": 32768, "rope_scaling": {"rope_type": "dynamic", "factor": 6.0}},
}
