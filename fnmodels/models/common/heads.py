"""The heads of models, each read from the class that config.json names in "architectures".

| head | class | `fnmodels.forward` returns |
|---|---|---|
| "none" | ...Model | the hidden states [B, S, D] |
| "lm" | ...ForCausalLM | logits [B, S, V] |
| "masked_lm" | ...ForMaskedLM | logits [B, S, V] |
| "replaced" | ...ForPreTraining of ELECTRA | whether a token was replaced, logits [B, S, 1] |
| "tokens" | ...ForTokenClassification | logits [B, S, labels] |
| "question_answering" | ...ForQuestionAnswering | the logits of an answer's first and last token, [B, S, 2] |
| "classification" | ...ForSequenceClassification | logits [N, labels], one row per document of `fnmodels.documents` |
"""

import json
import re
import sys
from collections.abc import Mapping
from typing import Any, TypeVar

from fnmodels.errors import ConfigError, UnsupportedError
from fnmodels.models.common.config_json import ConfigJson

from .config_json import Fields, shown
from .dropout import with_dropout
from .family import field_of, traits_of

CLASSES = {
    "none": "Model",
    "lm": "ForCausalLM",
    "masked_lm": "ForMaskedLM",
    "replaced": "ForPreTraining",
    "tokens": "ForTokenClassification",
    "question_answering": "ForQuestionAnswering",
    "classification": "ForSequenceClassification",
}
PER_DOCUMENT = ("classification",)  # the heads whose result has one row per document
C = TypeVar("C")
DECODER_HEADS = ("classification", "tokens")  # of decoders, besides "lm": `score` and, of tokens, `score_bias`
LABELLED = ("classification", "tokens", "question_answering")
# Whose class ...ForPreTraining has the masked-LM head, and beside it one of pairs of sentences that is not read: files
# of masked LMs have its tensors too.
_PRETRAINED = ("Bert", "Ernie", "MegatronBert")
PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")


def head_fields(fields: Fields, classes: str, heads: tuple[str, ...]) -> dict[str, Any]:
    """The Config fields `head`, `num_labels` and `problem_type` from a config.json.

    classes: what the names of the model's classes begin with, such as "Bert". heads: those that the family has; without
    "architectures" it is the first.
    """
    declared = fields.take("architectures", None)
    one = isinstance(declared, list) and len(declared) == 1 and isinstance(declared[0], str)
    if declared is not None and not one:
        raise ConfigError(f"{fields.where}: 'architectures' is {shown(declared)}, but must be a list of one name.")
    known = {classes + CLASSES[head]: head for head in heads}
    if classes in _PRETRAINED:
        known[f"{classes}ForPreTraining"] = "masked_lm"
    if declared is not None and declared[0] not in known:
        raise UnsupportedError(
            f"{fields.where}: 'architectures' has {shown(declared[0])}; supported are {', '.join(known)}."
        )
    head = heads[0] if declared is None else known[declared[0]]
    return {"head": head, "num_labels": _labels(fields) if head in LABELLED else 0, **problem_field(fields, head)}


def problem_field(fields: Fields, head: str) -> dict[str, str]:
    """The Config field `problem_type` from a config.json: one of PROBLEMS, "" where it has none or another head."""
    problem = fields.take("problem_type", None)
    if head not in PER_DOCUMENT or problem is None:
        return {}
    if problem not in PROBLEMS:
        raise ConfigError(
            f"{fields.where}: 'problem_type' is {shown(problem)}; it must be one of {', '.join(PROBLEMS)}."
        )
    return {"problem_type": problem}


def problem_of(config: Any) -> str:
    """One of PROBLEMS: the config's, by default regression for one label and else a single label, as transformers'."""
    declared: str = field_of(config, "problem_type")
    return declared or PROBLEMS[field_of(config, "num_labels") != 1]


def _labels(fields: Fields) -> int:
    """The number of labels: that of the names in `id2label`, by default 2 as in transformers."""
    names = fields.take("id2label", None)
    if names is not None and (not isinstance(names, Mapping) or not names):
        raise ConfigError(f"{fields.where}: 'id2label' is {shown(names)}, but must be an object with a name per label.")
    if names is not None and {str(key) for key in names} != {str(i) for i in range(len(names))}:
        raise ConfigError(
            f"{fields.where}: 'id2label' is {shown(names)}; its keys must be the labels 0 to {len(names) - 1}."
        )
    found = 2 if names is None else len(names)
    count: int = fields.integer("num_labels", found)
    if names is not None and count != found:
        raise ConfigError(f"{fields.where}: 'num_labels' is {count}, but 'id2label' has {found} labels.")
    return count


def label_names(fields: Fields) -> tuple[tuple[str, str], ...]:
    """The entry of a Config's `extra` that keeps the names of labels for saving."""
    names = fields.take("id2label", None)
    return () if names is None else (("id2label", json.dumps(names, sort_keys=True)),)


def check_head(config: Any) -> None:
    """For a Config's `__post_init__`: ConfigError for a head that its family lacks and for one without labels."""
    head, labels = config.head, config.num_labels
    known = traits_of(sys.modules[type(config).__module__]).heads
    if head not in known:
        raise ConfigError(f"head is {head!r}; this family's must be one of {', '.join(known)}.")
    if not isinstance(labels, int) or labels < (head in LABELLED):
        raise ConfigError(f"num_labels is {labels!r}; the head {head} needs an integer of at least 1.")
    check_problem(config)


def check_problem(config: Any) -> None:
    """For a Config's `__post_init__`: ConfigError for an unknown problem_type, and for a single label among one."""
    problem, labels = config.problem_type, config.num_labels
    if problem and problem not in PROBLEMS:
        raise ConfigError(f"problem_type is {problem!r}; it must be one of {', '.join(PROBLEMS)}.")
    if problem == "single_label_classification" and labels == 1 and config.head in PER_DOCUMENT:
        raise ConfigError(
            f"problem_type is {problem!r} and num_labels 1; a class is one of 2 or more labels, and a single score "
            "is a regression."
        )


def with_head(config: C, fields: Fields, extra: tuple[tuple[str, str], ...]) -> C:
    """A decoder's config with the head that "architectures" names, and with `extra`, what is kept for saving.

    Older files of the class without a head may have one for tokens all the same, which only their tensors say.
    """
    declared = fields.take("architectures", None)
    names = [str(name) for name in declared] if isinstance(declared, list) else []
    heads = [head for head in DECODER_HEADS if any(name.endswith(CLASSES[head]) for name in names)]
    if names and all(name.endswith("Model") and not name.endswith("LMHeadModel") for name in names):
        object.__setattr__(config, "head", "none")
    if heads:
        object.__setattr__(config, "head", heads[0])
        object.__setattr__(config, "num_labels", _labels(fields))
        for name, problem in problem_field(fields, heads[0]).items():
            object.__setattr__(config, name, problem)
        check_head(config)
        extra += label_names(fields)
    object.__setattr__(config, "extra", extra)
    return with_dropout(config, fields)


def decoder_head_to_hf(config: Any, architecture: str, kept: Mapping[str, Any]) -> ConfigJson:
    """The fields of config.json that `with_head` reads. architecture: the model type's class with a head for tokens."""
    classes = re.sub("(ForCausalLM|LMHeadModel)$", "", architecture)
    if field_of(config, "head") == "lm":
        return {"architectures": [architecture]}
    text = config.model_type.endswith("_text") and "Text" not in classes
    return head_to_hf(config, classes + "Text" * text, kept)


def head_to_hf(config: Any, classes: str, kept: Mapping[str, Any]) -> ConfigJson:
    """The fields of config.json that `head_fields` reads. kept: the fields that are kept for saving."""
    out: ConfigJson = {"architectures": [classes + CLASSES[config.head]]}
    if config.num_labels:
        names = kept.get("id2label") or {}
        if len(names) != config.num_labels:
            names = {str(i): f"LABEL_{i}" for i in range(config.num_labels)}
        out |= {"id2label": names, "label2id": {name: int(i) for i, name in names.items()}}
    return out | problem_to_hf(config)


def problem_to_hf(config: Any) -> dict[str, str]:
    """The field of config.json that `problem_field` reads."""
    return {"problem_type": config.problem_type} if config.problem_type and config.head in PER_DOCUMENT else {}
