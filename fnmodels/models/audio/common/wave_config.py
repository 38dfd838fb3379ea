"""Fields of the config.json of encoders of raw waves: the head, and what no forward pass reads."""

from fnmodels.errors import UnsupportedError
from fnmodels.models.common.config_json import Fields, shown

# Settings of training and pre-training, and of other heads.
IGNORED = {
    *("activation_dropout", "attention_dropout", "hidden_dropout", "final_dropout", "feat_proj_dropout", "layerdrop"),
    *("feat_quantizer_dropout", "feat_extract_dropout", "hidden_dropout_prob", "gradient_checkpointing"),
    *("apply_spec_augment", "mask_time_length", "mask_time_min_masks", "mask_feature_length"),
    *("mask_feature_min_masks", "num_codevectors_per_group", "num_codevector_groups", "contrastive_logits_temperature"),
    *("num_negatives", "codevector_dim", "proj_codevector_dim", "diversity_loss_weight", "ctc_loss_reduction"),
    *("ctc_zero_infinity", "classifier_proj_size", "tdnn_dim", "tdnn_kernel", "tdnn_dilation", "xvector_output_dim"),
    *("num_ctc_classes", "num_clusters", "adapter_kernel_size", "adapter_stride", "num_adapter_layers"),
    *("output_hidden_size", "num_feat_extract_layers", "replace_prob", "freeze_feat_extract_train", "tokenizer_class"),
    *("mask_channel_length", "mask_channel_min_space", "mask_channel_other", "mask_channel_prob"),
    *("mask_channel_selection", "mask_time_min_space", "mask_time_other", "mask_time_selection"),
    *("no_mask_channel_overlap", "no_mask_time_overlap"),
}


def head_of(fields: Fields, classes: str) -> str:
    """The head by the class that the file names; that of pre-training is left unread."""
    known = {f"{classes}Model": "none", f"{classes}ForPreTraining": "none", f"{classes}ForCTC": "lm"}
    declared = fields.take("architectures", [f"{classes}Model"])
    if not isinstance(declared, list) or len(declared) != 1 or declared[0] not in known:
        raise UnsupportedError(
            f"{fields.where}: 'architectures' has {shown(declared)}; supported are {', '.join(known)}."
        )
    return known[declared[0]]
