"""The names of DeepSeek V4's parameters in its files, which are DeepSeek's own, and in transformers' memory."""

from typing import Any

from fnmodels.models.common import moe as mixture
from fnmodels.models.common.storage import Stored, TensorSlice

# Of the traits `in_memory` and `resaved`.
IN_MEMORY = {
    r"^embed\.": "model.embed_tokens.",
    r"^head\.": "lm_head.",
    r"^norm\.": "model.norm.",
    r"^hc_head_": "model.hc_head.hc_",
    r"^layers\.": "model.layers.",
    r"\.attn_norm\.": ".input_layernorm.",
    r"\.ffn_norm\.": ".post_attention_layernorm.",
    r"\.hc_(attn|ffn)_": r".\1_hc.",
    r"\.attn\.indexer\.compressor\.": ".self_attn.compressor.indexer.",
    r"\.attn\.indexer\.wq_b\.": ".self_attn.compressor.indexer.q_b_proj.",
    r"\.attn\.indexer\.weights_proj\.": ".self_attn.compressor.indexer.scorer.weights_proj.",
    r"\.attn\.attn_sink": ".self_attn.sinks",
    r"\.attn\.": ".self_attn.",
    r"\.ffn\.": ".mlp.",
    r"(\.compressor(?:\.indexer)?)\.norm\.": r"\1.kv_norm.",
    r"\.ape$": ".position_bias",
    r"\.wq_a\.": ".q_a_proj.",
    r"\.q_norm\.": ".q_a_norm.",
    r"\.wq_b\.": ".q_b_proj.",
    r"\.wkv\.": ".kv_proj.",
    r"\.wgate\.": ".gate_proj.",
    r"\.wo_(a|b)\.": r".o_\1_proj.",
    r"\.gate\.bias$": ".gate.e_score_correction_bias",
    r"\.w1\.": ".gate_proj.",
    r"\.w2\.": ".down_proj.",
    r"\.w3\.": ".up_proj.",
}
RESAVED = {
    r"model\.embed_tokens\.(.*)": r"embed.\1",
    r"model\.norm\.(.*)": r"norm.\1",
    r"model\.hc_head\.hc_(.*)": r"hc_head_\1",
    r"model\.(layers\.\d+\.attn)\.norm\.(.*)": r"\1.kv_norm.\2",
    r"model\.(layers\..*)": r"\1",
}

_OUTSIDE = {"embed_tokens": "embed.weight", "lm_head": "head.weight", "norm": "norm.weight"}
_PARTS = {
    "input_layernorm": "attn_norm.weight",
    "post_attention_layernorm": "ffn_norm.weight",
    "attention.q_a_proj": "attn.wq_a.weight",
    "attention.q_a_layernorm": "attn.q_norm.weight",
    "attention.q_b_proj": "attn.wq_b.weight",
    "attention.kv_proj": "attn.wkv.weight",
    "attention.kv_a_layernorm": "attn.kv_norm.weight",
    "attention.sinks": "attn.attn_sink",
    "attention.o_a": "attn.wo_a.weight",
    "attention.o_b_proj": "attn.wo_b.weight",
    "attention.indexer.q_b_proj": "attn.indexer.wq_b.weight",
    "attention.indexer.weights_proj": "attn.indexer.weights_proj.weight",
    "attention.indexer.k_proj": "attn.indexer.wk.weight",  # of DeepSeek V4.1, as the next
    "attention.indexer.k_scale": "attn.indexer.k_norm.weight",
    "mlp.router": "ffn.gate.weight",
    "mlp.selection_bias": "ffn.gate.bias",
}
_COMPRESSOR = {"kv_proj": "wkv.weight", "gate_proj": "wgate.weight", "bias": "ape", "key_scale": "norm.weight"}
_EXPERT = {"gate_proj": "w1.weight", "down_proj": "w2.weight", "up_proj": "w3.weight"}


def stored(path: str, config: Any) -> Stored:
    """The name on disk of the parameter at `path`."""
    if path in _OUTSIDE or path == "score":
        return _OUTSIDE.get(path, "score.weight")
    part, number, inner = path.split(".", 2)  # an MTP head is a layer with further parameters
    where, last = f"{part}.{number}", path.rpartition(".")[2]
    if part == "mtp" and not inner.startswith("block."):
        return f"{path}.weight"
    inner = inner.removeprefix("block.")
    if inner in _PARTS:
        return f"{where}.{_PARTS[inner]}"
    if ".compressor." in inner:
        of = "attn.indexer.compressor" if ".indexer." in inner else "attn.compressor"
        return f"{where}.{of}.{_COMPRESSOR[last]}"
    if inner.startswith("mlp.experts."):
        return mixture.expert_names(f"{where}.ffn.experts", config.n_routed_experts, _EXPERT[last])
    if inner.startswith("mlp.shared_expert."):
        return f"{where}.ffn.shared_experts.{_EXPERT[last]}"
    if inner == "mlp.tid2eid":
        rows = config.vocab_size
        return TensorSlice(f"{where}.ffn.gate.tid2eid", 0, rows, rows, experts=config.n_routed_experts)
    if inner.startswith("fold."):
        return f"hc_head_{last}" if part == "layers" else f"{where}.hc_head_{last}"
    return f"{where}.hc_{'attn' if inner.startswith('attention_hyper') else 'ffn'}_{last}"
