"""What the Hub calls models of the types that have no preset, for the table of docs/models.md."""

# {model type: repositories whose config.json has it, or why there is none}
HUB = {
    "audioflamingo3": "nvidia/audio-flamingo-3-hf",
    "axk1": "skt/A.X-K1",
    "aya_vision": "CohereLabs/aya-vision-8b, CohereLabs/aya-vision-32b",
    "bailing_moe_v2": "none: files of Ling 2 say bailing_moe",
    "blip": "Salesforce/blip-image-captioning-base, Salesforce/blip-image-captioning-large",
    "cohere2_moe": "CohereLabs/command-a-plus-05-2026",
    "cohere2_vision": "CohereLabs/command-a-vision-07-2025",
    "cwm": "facebook/cwm",
    "data2vec-text": "facebook/data2vec-text-base",
    "deepseek_vl": "deepseek-community/deepseek-vl-1.3b-chat",
    "ernie": "nghuyong/ernie-3.0-base-zh",
    "exaone4_5": "LGAI-EXAONE/EXAONE-4.5-33B",
    "gemma3n": "google/gemma-3n-E2B-it, google/gemma-3n-E4B-it",
    "gemma4": "google/gemma-4-E2B-it, google/gemma-4-26B-A4B-it",
    "gemma4_unified": "google/gemma-4-12B-it",
    "glm46v": "none: files of GLM-4.6V say glm4v_moe, those of GLM-4.6V-Flash glm4v",
    "glm5_next": "zai-org/GLM-5.3-Flash",
    "glm_ocr": "zai-org/GLM-OCR",
    "glmasr": "zai-org/GLM-ASR-Nano-2512",
    "gpt-sw3": "AI-Sweden-Models/gpt-sw3-126m",
    "granite_speech": "ibm-granite/granite-speech-3.3-2b, ibm-granite/granite-speech-3.3-8b",
    "granite_speech_plus": "ibm-granite/granite-speech-4.1-2b-plus",
    "granite_swa": "ibm-granite/granite-swash-2b",
    "granitemoe_swa": "ibm-granite/granite-swash-3b-a600m",
    "granitemoeshared": "ibm-research/moe-7b-1b-active-shared-experts",
    "hy_v4_vl": "tencent/Hy4",
    "inkling2": "thinkingmachines/Inkling-2-Small-MXFP8",
    "inkling2_loop": "thinkingmachines/Inkling-2-Mini",
    "iquestcoder": "IQuestLab/IQuest-Coder-V1-40B-Instruct",
    "kimi_k25": "moonshotai/Kimi-K2.6",
    "llava_next_video": "llava-hf/LLaVA-NeXT-Video-7B-hf",
    "megatron-bert": "nvidia/megatron-bert-uncased-345m",
    "minimax_m1": "MiniMaxAI/MiniMax-M1-40k, MiniMaxAI/MiniMax-M1-80k",
    "minimax_m3_vl": "MiniMaxAI/MiniMax-M3",
    "minimax_text_01": "MiniMaxAI/MiniMax-Text-01",
    "mistral_large4": "mistralai/Mistral-Large-4-1T-A52B",
    "muse_glimmer": "meta-models/Muse-Glimmer-30B",
    "phimoe": "microsoft/Phi-3.5-MoE-instruct",
    "qianfan_ocr": "baidu/Qianfan-OCR",
    "qwen3_asr": "Qwen/Qwen3-ASR-1.7B-hf",
    "qwen4_exp": "Qwen/Qwen3.8-Flash-Next",
    "roberta-prelayernorm": "andreasmadsen/efficient_mlm_m0.40",
    "sarvam_mla": "sarvamai/sarvam-105b",
    "step3p7": "stepfun-ai/Step-3.7-Flash",
    "unispeech": "microsoft/unispeech-large-1500h-cv",
    "unispeech-sat": "microsoft/unispeech-sat-base-100h-libri-ft",
    "vaultgemma": "google/vaultgemma-1b",
    "voxtral_realtime": "mistralai/Voxtral-Mini-4B-Realtime-2602",
}
# {model type of a part: the types that it is a part of}, where its name does not begin with theirs
PARTS = {"pixtral": "mistral3, lighton_ocr and llava", "step3p5_vision": "step3p7"}
_WHOLE = ("cohere2_vision",)  # a model, and not the tower of cohere2
_SUFFIXES = {"_text_model": "text", "_vision_model": "tower", "_text": "text", "_vision": "tower"}


def whole_of(model_type: str, known: set[str]) -> str:
    """ "the text of gemma4" of gemma4_text, where gemma4 is one of the known types; "" of a type that is no part."""
    if model_type in PARTS:
        return f"the tower of {PARTS[model_type]}"
    for suffix, part in _SUFFIXES.items() if model_type not in _WHOLE else ():
        if model_type.endswith(suffix) and (whole := model_type.removesuffix(suffix)) in known:
            return f"the {part} of {whole}"
    return ""
