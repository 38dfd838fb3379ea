"""config.json files as releases of transformers write them, kept in tests/fnmodels/models/releases/RELEASE.json.xz.

    python -m tests.support.release_configs 4.40.2 tokenizers=0.19.0 FOLDER...

writes that file from the packages in the folders, which `pip install --no-deps --target FOLDER transformers==4.40.2`
fills; older releases need requests, pyyaml and a huggingface_hub below 1 beside them. NAME=VERSION states another
version of an installed package, which the release checks. Without arguments it is the installed release.
"""

import copy
import functools
import hashlib
import json
import lzma
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import transformers

import fnmodels
from fnmodels.models.common.registry import every_model
from fnmodels.models.presets import published
from tests.fnmodels.models import (
    test_blip,
    test_glmasr,
    test_granite_speech,
    test_mllama,
    test_qwen2_audio,
    test_qwen3_asr,
    test_voxtral_realtime,
    test_wav2vec2,
)
from tests.parity.test_config import published_dialect
from tests.support.cases import cases, collected, variants_of
from tests.support.image_texts import image_cases
from tests.variants import inkling2, moonshine, t5, vision, whisper

FOLDER = Path(__file__).parents[1] / "fnmodels" / "models" / "releases"
# {model type: fields that a release replaces in what it is given}: gpt-sw3 is GPT-2, T5's second edition counts as tied
# whatever its file says, and HRM-Text counts the layers of all its cycles.
REPLACED = {"gpt-sw3": ["model_type"], "mt5": ["tie_word_embeddings"], "hrm_text": ["num_hidden_layers"]}
# {wrapper: the family of its text}, of wrappers of which the text alone is read
TEXTS = {
    "gemma3n": "gemma3n",
    "minimax_m3_vl": "minimax_m3",
    "mistral_large4": "mistral_large4",
    "muse_spark": "muse_spark",
    "qwen4_exp": "qwen4_exp",
}
_ASKED = "asked"  # beside the labels: `digest_of` what was asked for
# Runs in the release, with {label: config.json} as its input: argument 1 are the versions to state, 2 is `REPLACED`.
_WRITE = """
import copy, importlib.metadata, json, logging, sys
stated, replaced, version = json.loads(sys.argv[1]), json.loads(sys.argv[2]), importlib.metadata.version
importlib.metadata.version = lambda name: stated.get(name) or version(name)
logging.disable(logging.CRITICAL)
from transformers import AutoConfig
written = {}
for label, values in json.load(sys.stdin).items():
    try:
        config = AutoConfig.for_model(**copy.deepcopy(values))
    except Exception:  # a model type or a field of later releases
        continue
    full, saved = (json.loads(config.to_json_string(use_diff=diff)) for diff in (False, True))
    plain = {name: value for name, value in values.items() if not isinstance(value, dict) and name in full}
    other = {name: full[name] for name, value in plain.items() if full[name] != value}
    if other.keys() <= set(replaced.get(values["model_type"], ())):  # else the release replaces what it was given
        written[label] = {"minimal": values, "full": full, "saved": saved, **({"replaced": other} if other else {})}
print(json.dumps(written, sort_keys=True))
"""


def releases() -> list[str]:
    """The releases whose files are kept."""
    return sorted(path.name.removesuffix(".json.xz") for path in FOLDER.glob("*.json.xz"))


@functools.cache
def written_by(release: str) -> dict[str, dict[str, dict[str, Any]]]:
    """{label: {"minimal": what says all, "full": `to_dict()`, "saved": what `save_pretrained` writes}}.

    "replaced" has the fields of the minimal file that the release writes with another value.
    """
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(
        lzma.decompress((FOLDER / f"{release}.json.xz").read_bytes())
    )
    return {label: forms for label, forms in found.items() if label != _ASKED}


def asked_of(release: str) -> str:
    """The digest of the minimal files that the release's file was made of."""
    digest: str = json.loads(lzma.decompress((FOLDER / f"{release}.json.xz").read_bytes())).get(_ASKED, "")
    return digest


def digest_of(files: dict[str, dict[str, Any]]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def minimal_files(release: str) -> dict[str, dict[str, Any]]:
    """{label: config.json} of every model type: tiny variants, presets, published files, and the parts of wrappers."""
    found = {f"tiny/{case.name}": case.values for case in cases() if case.values is not None}
    found |= {f"preset/{name}": values for name, values in published().items() if "model_type" in values}
    found |= {f"published/{name}": values for name, values in collected("FILES").items()}
    found |= {f"tiny/{name}": values for name, values in (vision.variants() | vision.pairs() | t5.variants()).items()}
    found |= {"tiny/whisper": whisper.TINY} | {
        f"tiny/{case}_images": _values_of(case) for case in image_cases(every=True)
    }
    sounds = test_qwen2_audio.VARIANTS | test_granite_speech.VARIANTS
    found |= {f"tiny/{name}_sounds": values for name, values in sounds.items()}
    found["tiny/voxtral_realtime"] = test_voxtral_realtime.VALUES
    found["tiny/glmasr_sounds"] = test_glmasr.VALUES
    found["tiny/mllama"] = test_mllama.VALUES
    found["tiny/blip"] = test_blip.VALUES
    found["tiny/qwen3_asr_sounds"] = test_qwen3_asr.VALUES
    found |= {
        f"wrapped/{name}": {"model_type": name, "text_config": variants_of(text).TINY} for name, text in TEXTS.items()
    }
    for name, text_config in (("inkling2", inkling2.TINY), ("inkling2_loop", inkling2.LOOP)):
        tower = {"text_hidden_size": text_config["hidden_size"]}
        found[f"wrapped/{name}"] = {"model_type": name, "text_config": text_config, "vision_config": tower}
    found |= {f"tiny/{name}": values for name, values in (test_wav2vec2.VARIANTS | moonshine.variants()).items()}
    found = {label: copy.deepcopy(values) for label, values in found.items()}
    known = every_model()  # each call looks at every family
    for label, values in list(found.items()):
        for part in ("text", "vision"):
            own = copy.deepcopy(values.get(f"{part}_config", {}))
            own.setdefault("model_type", f"{values['model_type']}_{part}_model")
            complete = {"hidden_size", "mm_embed_dim"} & own.keys() and (
                part == "vision" or "num_attention_heads" in own
            )
            # the text of Kimi K3 says that it is a kimi_linear, which is refused where it stands alone
            if own["model_type"] in known and complete and values["model_type"] != "kimi_k3":
                found[f"{label}/{part}"] = own
    if not release.startswith("5."):
        found = {label: _older(values, release) for label, values in found.items()}
    return {label: values | {"transformers_version": release} for label, values in found.items()}


def _values_of(case: Any) -> dict[str, Any]:
    tests: Any = case.tests
    if hasattr(tests, "CONFIG"):
        return dict(tests.VALUES)
    return dict(tests.VARIANTS[case.label] if hasattr(tests, "VARIANTS") else tests.values_of(case.label))


def _older(values: dict[str, Any], release: str) -> dict[str, Any]:
    """The form in which files of transformers 4 had it."""
    values = published_dialect(values) if values["model_type"] in fnmodels.families() else _flat_rope(values)
    for part in ("text_config", "vision_config"):
        if isinstance(values.get(part), dict):
            read = values[part].get("model_type") in fnmodels.families()
            values[part] = published_dialect(values[part]) if read else _flat_rope(values[part])
    if values["model_type"] == "vipllava":
        values["vision_feature_layers"] = values.pop("vision_feature_layer")
    if values["model_type"] in ("qwen2_vl", "qwen2_5_vl") and "text_config" in values:  # whose files had one level
        text = {name: value for name, value in values.pop("text_config").items() if name != "model_type"}
        values = text | values
        if isinstance(values.get("rope_scaling"), dict):
            values["rope_scaling"]["type"] = values["rope_scaling"].pop("rope_type")
    if release < "4.2" and values["model_type"] == "clip":  # whose parts had these names
        values |= {f"{part}_dict": values.pop(part, None) for part in ("text_config", "vision_config")}
    return values


def _flat_rope(values: dict[str, Any]) -> dict[str, Any]:
    rope = values.get("rope_parameters")
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        return values
    flat = {name: value for name, value in values.items() if name != "rope_parameters"}
    outside = ("rope_theta", "partial_rotary_factor")
    scaling = {name: value for name, value in rope.items() if name not in outside}
    flat |= {name: rope[name] for name in outside if name in rope}
    return flat | ({"rope_scaling": scaling} if scaling.keys() - {"rope_type"} else {})


def main(release: str = "", *rest: str) -> None:
    """Write the file of a release, of the installed one by default."""
    stated = dict(text.split("=") for text in rest if "=" in text)
    folders = [os.path.abspath(folder) for folder in rest if "=" not in folder]
    release = release or transformers.__version__
    files = minimal_files(release)
    done = subprocess.run(
        [sys.executable, "-c", _WRITE, json.dumps(stated), json.dumps(REPLACED)],
        input=json.dumps(files),
        capture_output=True,
        check=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
    )
    written = json.loads(done.stdout)
    FOLDER.mkdir(exist_ok=True)
    text = json.dumps(written | {_ASKED: digest_of(files)}, sort_keys=True)
    (FOLDER / f"{release}.json.xz").write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    written_by.cache_clear()
    print(f"{len(written)} of {len(files)} configurations are written by {release}")


if __name__ == "__main__":
    main(*sys.argv[1:])
