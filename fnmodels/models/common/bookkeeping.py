"""Bookkeeping in config.json: fields about training, generation, tokens, kernels or a library, which change no output.

A field is one by its name and its kind of value, so that the fields of publishers that nobody has seen are known too.
"""

import re
from typing import Any

# Those named summary_* are of a head that is not read, whatever the model.
# Fields of PreTrainedConfig, of generation, of scripts and of model cards that change no output of a forward pass.
_HARMLESS = """
    _num_labels add_bos_token add_cross_attention add_eos_token architectures attn_implementation auto_map bad_words_ids
    begin_suppress_tokens
    cache_implementation chunk_size chunk_size_feed_forward diversity_penalty do_sample dtype early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task generation_config id2label is_decoder
    is_llama_config label2id length_penalty mamba_chunk_size max_length max_seq_len max_seq_length max_sequence_length
    min_length min_p model_max_length model_type no_repeat_ngram_size num_beam_groups num_beams num_labels
    num_return_sequences
    output_attentions output_hidden_states output_past output_router_logits output_scores padding_idx prefix
    pretraining_tp summary_activation summary_first_dropout summary_last_dropout summary_proj_to_labels summary_type
    summary_use_proj
    problem_type remove_invalid_values repetition_penalty return_dict return_dict_in_generate
    sbert_ce_default_activation_function seq_len seq_length
    suppress_tokens task_specific_params temperature tie_encoder_decoder top_k top_p torch_dtype typical_p use_bfloat16
    use_cache
    base_model chat_template custom_pipelines datasets device_map global_step learning_rate library_name max_new_tokens
    model_name model_parallel name_or_path neuron padding_side pipeline_tag processor_class stop_strings tags
    tokenizer_padding_side trust_remote_code weight_decay world_size
"""
# Words in names of fields about training, whose numbers are settings of it: `forward` applies no dropout.
_TRAINING_WORDS = """
    checkpointing dropout dropouts flos gradient init initializer layerdrop loss neftune optimizer pdrop train trainer
    training
"""
# Names of programs and libraries.
_TOOL_WORDS = """
    autotrain axolotl coreml deepspeed flax jax llamafactory megatron mergekit nemo onnx openvino optimum peft sbert
    sglang tf tokenizer torchscript transformers triton trl unsloth vllm wandb xla
"""
# All other words of such names, unless the field is a number about training: none is a part of a model.
_NEUTRAL_WORDS = """
    accumulation args aux bytes ce class clip coef config data dataset date default device enable enabled entity entropy
    epochs file fixed fn function id is kind kwargs legacy length level loader max method mode model name num path
    pretrained project revision router run sentence stage std steps train type use used version weight weights with z
"""
# And of switches of dropout.
_DROPPED_WORDS = "attention attn classifier embed embedding ffn hidden mlp pooler residual resid"
# Names of switches of kernels, of whatever part that every model has, and of their settings; in full.
_KERNEL = re.compile(
    r"(?:use|enable|deterministic|is)?_?(?:flash|fused?|liger|sdpa|xformers|memory_efficient|triton)_?"
    r"(?:attn|attention|add|bias_fc|cross_entropy|dropout_add_ln|kernels?|layer_?norm|linear_cross_entropy|ln|mlp|norm|"
    r"rms_?norm|add_norm)?(?:_?[23])?(?:_(?:enabled|available|chunk_size))?"
)
# And of switches that fuse operations in Megatron.
_FUSION = re.compile(
    r"(?:apply_)?(?:(?:bias|masked|dropout|softmax|gelu|swiglu|activation|rope|rotary|gradient|accumulation|layer_?norm)_)+"
    r"fusion"
)
_KERNEL_CHOICE = re.compile(
    r"(?:flash|sdpa|xformers|triton)?_?(?:attn|attention)_(?:backend|impl|implementation|version)"
)
# Words of names of texts that say what a checkpoint is called or made for.
_LABELS = frozenset(["author", "authors", "description", "language", "languages", "license", "name"])
# What a vocabulary is rounded up to a multiple of: its size in the file is the result, and the tensors' shape.
_VOCAB_MULTIPLE = re.compile(r"(?:pad_|make_|padded_)?vocab_size_(?:multiple(?:_of)?|divisible_by)")
_TOKEN_IDS = ("_token_id", "_token_ids", "_token_index", "_token", "_id")  # ends of names
# Words in names of numbers of parts, which are no tokens.
_NUMBERED = frozenset(("block", "blocks", "expert", "experts", "head", "heads", "layer", "layers"))
# Words in names of numbers that scale or count a part, so that no other word makes such a number bookkeeping.
_SCALES = "scale scales scaling scaled multiplier factor"
_COUNTS = """
    base beta cap count ctx depth dim dims dimension dimensions eps epsilon experts freq group groups heads height k
    kernel kv layers multiple n num offset period positions rank ratio size sizes slope softcap softcapping stride
    temperature theta top topk vocab width window
"""
# But for those about the sizes of initial values, and about the weight of a loss, where these words follow, and for
# numbers of runs, whatever the rest of the name.
_OF_TRAINING = "init initializer loss"
_OF_RUNS = """
    autotrain axolotl batch batches chunk chunks deepspeed dropout dropouts epochs layerdrop llamafactory optimizer
    pdrop trainer wandb workers
"""
# Dropout rates that a saved checkpoint keeps for training elsewhere, under every published name.
_DROPOUTS = """
    attention_dropout attention_probs_dropout_prob attn_pdrop classifier_dropout dropout emb_pdrop embd_pdrop
    embed_dropout embedding_dropout hidden_dropout hidden_dropout_prob mlp_dropout qa_dropout resid_dropout resid_pdrop
    residual_dropout seq_classif_dropout
"""
DROPOUTS = tuple(_DROPOUTS.split())
# How the weights in the files are quantized, under every published name: `params.quantized` reads it on loading.
QUANTIZATION = ("quantization_config", "compression_config", "quantization")
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")  # whose values are checked with the checkpoint
HARMLESS = frozenset((*_HARMLESS.split(), *QUANTIZATION, *SPECIAL_TOKENS))
_TRAINING, _TOOLS = frozenset(_TRAINING_WORDS.split()), frozenset(_TOOL_WORDS.split())
_NEUTRAL = frozenset(_NEUTRAL_WORDS.split())
_DROPPED = frozenset(_DROPPED_WORDS.split())
_SCALING, _MEASURES = frozenset(_SCALES.split()), frozenset((_SCALES + _COUNTS).split())
_LIKE_INITIAL, _LIKE_RUNS = frozenset(_OF_TRAINING.split()), frozenset(_OF_RUNS.split())


def is_bookkeeping(name: str, value: Any) -> bool:
    """Whether a field is about training, generation, tokens, kernels or a library: by its name and kind of value.

    A number that scales or counts a part is none, whatever else its name says, nor is a switch or a kind of a scale;
    what ends like the name of a token is an id or a text.
    """
    words = name.lower().replace(".", "_").split("_")
    if name in HARMLESS or name in DROPOUTS:  # rates, which `with_dropout` reads
        return True
    if _VOCAB_MULTIPLE.fullmatch(name):
        return isinstance(value, int)
    if _LABELS.issuperset(words):
        return isinstance(value, str) or (isinstance(value, list) and all(isinstance(text, str) for text in value))
    if _measures(words, value):
        return False
    ids = value if isinstance(value, list) else [value or 0]  # a token's switch that is off is harmless
    is_token = name.endswith(_TOKEN_IDS) and not any(isinstance(token_id, bool | float) for token_id in ids)
    is_token = is_token and not _NUMBERED & set(words)
    return _is_of_tools(name, words, value) or name.startswith("_") or "." in name or is_token


def _is_of_tools(name: str, words: list[str], value: Any) -> bool:
    """Whether a field is about training, a library or a kernel: no word of its name may be about a part of a model.

    A number about training is a setting of it whatever part it is for, and a switch of dropout may name one.
    """
    if _FUSION.fullmatch(name):
        return isinstance(value, bool)
    if _KERNEL.fullmatch(name):
        return isinstance(value, bool | int)
    if _KERNEL_CHOICE.fullmatch(name):
        return isinstance(value, str | int)
    found, rest = (_TRAINING | _TOOLS) & set(words), set(words) - _TRAINING - _TOOLS - _NEUTRAL
    if not found:
        return False
    if isinstance(value, int | float) and not isinstance(value, bool) and _TRAINING & found:
        return True
    return not rest or (isinstance(value, bool) and "dropout" in found and rest <= _DROPPED)


def _measures(words: list[str], value: Any) -> bool:
    """Whether a field whose name has these words scales or counts a part of a model."""
    numbers = value if isinstance(value, list) else [value]
    if not numbers or not all(isinstance(n, bool | int | float | str) for n in numbers) or _LIKE_RUNS & set(words):
        return False
    of_model, training = [], False
    for word in words:
        training = word in _LIKE_INITIAL or (training and word in _SCALING)
        of_model += [] if training else [word]
    return bool(set(of_model) & (_SCALING if any(isinstance(number, bool | str) for number in numbers) else _MEASURES))
