"""The names of Inkling 2's parameters in its files, which are not those of transformers' module."""

from dataclasses import replace
from typing import Any

from fnmodels.tree import flatten

from ..registry import family_of
from ..storage import Stored, TensorSlice, fuse

_ENDS = {"embed_tokens": "embed.weight", "embed_norm": "embed_norm.weight", "norm": "norm.weight"}
_LAYER = {
    "attention_conv": "attn_sconv.weight",
    "mlp_conv": "mlp_sconv.weight",
    "input_layernorm": "attn_norm.weight",
    "post_attention_layernorm": "mlp_norm.weight",
    **{f"{name}_input_layernorm": f"{name}_input_norm.weight" for name in "qkv"},
    "attention.q_proj": "attn.wq_du.weight",
    "attention.k_proj": "attn.wk_dv.weight",
    "attention.v_proj": "attn.wv_dv.weight",
    "attention.o_proj": "attn.wo_ud.weight",
    "attention.gate_proj": "attn.gate_attn.weight",
    "attention.sink_proj": "attn.attn_sink_proj.weight",
    "attention.relative_proj": "attn.wr_du.weight",
    "attention.relative_bank": "attn.rel_logits_proj.proj",
    "attention.q_scale": "attn.q_l2_clip.scale",
    "attention.relative_scale": "attn.rel_l2_clip.scale",
    **{f"attention.{name}_taps_proj": f"attn.{name}_sconv.weight_proj" for name in "kv"},
    "mlp.router": "mlp.gate.weight",
    "mlp.selection_bias": "mlp.gate.bias",
    "mlp.experts.down_proj": "mlp.experts.w2_weight",
}
_GATES = {"q": "attn", "k": "k", "v": "v", "mlp": "mlp"}
_GATE = {"down_proj": "down_weight", "forget_proj": "forget_weight", "message_proj": "gain_weight"}


def hf_names(config: Any) -> dict[str, Stored]:
    """{path of a parameter: its name on disk, or its slice of a tensor}."""
    names: dict[str, Stored] = {}
    for path in flatten(family_of(config).spec(config)):
        _, _, rest = path.partition(".")
        number, _, leaf = rest.partition(".")
        where, last = f"model.llm.layers.{number}", leaf.rpartition(".")[2]
        if not path.startswith("layers."):
            names[path] = f"model.llm.{_ENDS[path]}" if path in _ENDS else f"{path}.weight"
        elif leaf in ("mlp.experts.gate_proj", "mlp.experts.up_proj"):  # rows of both in turn
            inner, row = config.moe_intermediate_size, int(last == "up_proj")
            stack = f"{where}.mlp.experts.w13_weight"
            names[path] = TensorSlice(stack, row, row + 1, 2 * inner, groups=inner, batched=True)
        elif leaf in ("attention.k_conv", "attention.v_conv"):
            static = "weight" if config.slides_at(int(number)) else "static_w"
            names[path] = f"{where}.attn.{last[0]}_sconv.{static}"
        elif leaf == "attention_query":
            names[path] = f"model.llm.attn_res.attn_queries.{int(number) - 1}"
        elif leaf == "mlp_query":
            names[path] = f"model.llm.attn_res.mlp_queries.{number}"
        elif leaf == "fold_query":
            names[path] = "model.llm.attn_res.output_query"
        elif leaf.startswith("gates."):
            names[path] = f"{where}.controllers.{_GATES[leaf.split('.')[1]]}.{_GATE[last]}"
        elif not leaf.startswith("messages."):
            names[path] = f"{where}.{_LAYER[leaf]}"
    if "lm_head" in names:  # with rows of zeros up to those of the embedding
        names["lm_head"] = TensorSlice("model.llm.unembed.weight", 0, config.vocab_size, config.embedding_rows)
    looped = range(config.loop_start, config.loop_end)
    for name, pair in (("queries", ("q", "mlp")), ("kv_queries", ("k", "v"))):
        rows = {f"layers.{index}.messages.{one}": 1 for index in looped for one in pair}
        names |= fuse(f"model.llm.middle_cycle_cross_pass_{name}", rows)
    return names


# {pattern in a name of a file: what transformers' module has there}
IN_MEMORY = {
    r"\.controllers\.attn\.": ".q_message_gate.",
    r"\.controllers\.(k|v|mlp)\.": r".\1_message_gate.",
    r"_message_gate\.down_weight$": "_message_gate.down_proj.weight",
    r"_message_gate\.gain_weight$": "_message_gate.message_gate_proj.weight",
    r"_message_gate\.forget_weight$": "_message_gate.forget_gate_proj.weight",
    r"\.embed\.weight$": ".embed_tokens.weight",
    r"\.embed_norm\.": ".embed_tokens.embed_norm.",
    r"\.w2_weight$": ".down_proj",
    r"\.gate\.bias$": ".gate.e_score_correction_bias",
    r"\.attn\.": ".self_attn.",
    r"\.wq_du\.": ".q_proj.linear.",
    r"\.w([kv])_dv\.": r".\1_proj.linear.",
    r"\.([kv])_sconv\.": r".\1_proj.sconv.",
    r"\.rel_logits_proj\.": ".relative_position_bias.",
    r"\.wr_du\.": ".relative_position_bias.linear.",
    r"\.q_l2_clip\.": ".q_proj.norm.",
    r"\.rel_l2_clip\.": ".relative_position_bias.norm.",
    r"\.wo_ud\.": ".o_proj.linear.",
    r"\.gate_attn\.": ".o_proj.gate_proj.",
    r"\.attn_sink_proj\.": ".sink_proj.",
    r"\.attn_sconv\.": ".post_attention_convolution.",
    r"\.mlp_sconv\.": ".post_mlp_convolution.",
    r"(convolution|sconv)\.weight$": r"\1.conv1d.weight",
    r"sconv\.static_w$": "sconv.static_weight",
    r"sconv\.weight_proj$": "sconv.weight_proj.weight",
    r"\.mlp_norm\.": ".post_attention_layernorm.",
    r"\.attn_norm\.": ".input_layernorm.",
    r"\.([qkv])_input_norm\.": r".\1_input_layernorm.",
    r"attn_res\.mlp_queries\.(\d+)$": r"layers.\1.mlp_input.query",
    r"attn_res\.output_query$": "final_input.query",
}


def in_memory(config: Any) -> dict[str, str]:
    """Patterns beside `IN_MEMORY`: the first part of names."""
    return {r"^model\.llm\.": "model." if config.model_type.endswith("_text") else "model.language_model."}


def in_memory_forms(config: Any) -> dict[str, Stored]:
    """{path: its place in transformers' module} of parameters that it holds otherwise than files do.

    The messages' queries are one tensor [layers of the loop, 4, D] there, of which these are rows.
    """
    first = in_memory(config)[r"^model\.llm\."]
    found: dict[str, Stored] = {"lm_head": "lm_head.weight"} if config.head == "lm" else {}
    inner, looped = config.moe_intermediate_size, config.loop_end - config.loop_start
    for index in range(config.stored_layers):
        at, where = f"layers.{index}", f"{first}layers.{index}"
        rows = {f"{at}.mlp.experts.{name}_proj": inner for name in ("gate", "up")}
        stacked = fuse(f"{where}.mlp.experts.gate_up_proj", rows)
        found |= {path: replace(piece, batched=True) for path, piece in stacked.items()}
        if index:
            found[f"{at}.attention_query"] = f"{where}.attention_input.query"
        for row, name in enumerate(("q", "k", "v", "mlp") if config.loop_start <= index < config.loop_end else ()):
            start = 4 * (index - config.loop_start) + row
            found[f"{at}.messages.{name}"] = TensorSlice(f"{first}message_input.query", start, start + 1, 4 * looped)
    return found
