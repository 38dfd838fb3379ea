"""Published totals of models of a text with images or sounds, beside those of `tests.variants.vision`.

A total is what the tensors of the publisher's files add up to. Those of LLaVA are the sums of published parts: the
text, CLIP or SigLIP without its head, and a projector. Of Qwen3.5 the MTP head counts.
"""

CLIP_L_336 = 303_507_456
# SigLIP's total of `vision.TOTALS`, without the last of 27 layers, and with 27 x 27 positions in place of 16 x 16.
SIGLIP_26_LAYERS = 412_442_352 - 15_239_504 + (729 - 256) * 1152
WHISPER_LARGE_V3_ENCODER = 636_968_960
# Mistral Small 3.1 less Mistral Small 3 and the projector.
PIXTRAL = 24_011_361_280 - 23_572_403_200 - (1024 + 4096 * 1024 + 1024 * 5120 + 5120 * 5120)


def _llava(text: int, width: int, added: int = 64, tower: int = CLIP_L_336, narrow: int = 1024) -> int:
    """text: the published total, before `added` tokens with embedding and head; the last term is the newline."""
    projector = narrow * width + width + width * width + width
    return text + 2 * added * width + tower + projector + width


_VICUNA = 6_738_415_616 + 2 * 64 * 4096
_VIP = 2 * 5120 + 5120 * 4096 + 4096 + 4096 * 4096 + 4096  # a norm and an MLP over five layers of the tower
_QWEN2_72B, _SIGLIP = 72_706_203_648, (SIGLIP_26_LAYERS, 1152)

TOTALS: dict[str, int | str] = {
    "llava-1.6-mistral-7b": _llava(7_241_732_096, 4096),
    "llava-1.6-vicuna-7b": _llava(6_738_415_616, 4096),
    "llava-1.6-vicuna-13b": _llava(13_015_864_320, 5120),
    "llava-1.6-34b": _llava(34_388_917_248, 7168),
    # one table of embeddings, which is the head: half of what is added
    "llava-onevision-0.5b": _llava(494_032_768, 896, 32, *_SIGLIP),
    "llava-onevision-7b": _llava(7_615_616_512, 3584, 64, *_SIGLIP),
    "llava-onevision-72b": _llava(_QWEN2_72B, 8192, 64, *_SIGLIP),
    "vip-llava-7b": _VICUNA + CLIP_L_336 + _VIP,
    # two towers of 256 patches
    "video-llava-7b": _VICUNA + 2 * (CLIP_L_336 - (576 - 256) * 1024) + 1024 * 4096 + 4096 * 4096 + 2 * 4096,
    "idefics3-8b": 8_462_086_384,
    "smolvlm-256m": 256_484_928,
    "smolvlm-500m": 507_482_304,
    "smolvlm-2.2b": 2_246_272_880,
    "smolvlm2-256m": 256_484_928,
    "smolvlm2-500m": 507_482_304,
    "smolvlm2-2.2b": 2_246_272_880 + 2 * 125 * 2048,  # with 125 more tokens
    "internvl3-1b": 938_193_024,
    "internvl3-2b": 2_088_957_440,
    "internvl3-8b": 7_944_373_760,
    "lfm2-vl-450m": 450_822_656,
    "lfm2-vl-1.6b": 1_584_804_000,
    "glm-4.1v-9b": 10_292_777_472,
    "glm-4.5v": 107_710_933_120,
    # Qwen3 0.6B, the tower of Mistral Small 3.1, and a projector
    "lightonocr-1b": 596_049_920 + PIXTRAL + 1024 + 4096 * 1024 + 2 * 1024 * 1024,
    "llama-3.2-11b-vision": "10.6B",
    "llama-3.2-11b-vision-instruct": 10_670_220_835,
    "blip2-opt-2.7b": "3.74B",
    "blip2-opt-6.7b": "7.75B",
    "qwen3.5-0.8b": 873_438_784,
    "qwen3.5-2b": 2_274_069_824,
    "qwen3.5-4b": 4_659_865_088,
    "qwen3.5-9b": 9_653_104_368,
    "qwen3.5-27b": 27_781_427_952,
    "qwen3.5-35b-a3b": 35_951_822_704,
    "qwen3.5-122b-a10b": 125_086_497_008,
    "qwen3.5-397b-a17b": 403_397_928_944,
    "qwen2-audio-7b": 8_397_094_912,
    "voxtral-mini-3b": 4_676_271_104,
    # Mistral Small 3, Whisper large-v3's encoder, and a projector of groups of four tokens
    "voxtral-small-24b": 23_572_403_200 + WHISPER_LARGE_V3_ENCODER + 2 * 5120 * 5120,
}
