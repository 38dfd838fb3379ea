"""Checkpoints of the Hugging Face Hub by name: "org/name" in place of a folder, through the extra `hub`.

huggingface_hub downloads into its own cache and keeps its rules: HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE, HF_TOKEN. A name
is one of the Hub only where neither a file nor a folder of that name, nor the folder before its slash, exists.
"""

import errno
import os
import re
from importlib.util import find_spec
from pathlib import Path

FILES = (".gguf", ".safetensors", ".json")  # ends of names that are paths, mistyped or not
NAME = re.compile(r"(?P<model>[\w-][\w.-]*/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
# What reading a model, its tokenizer and its settings may need. Weights in other formats are never fetched.
NEEDED = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt", "spm.*")
# Weights that stand beside model*.safetensors under other names, or in forms for other programs.
OTHER_COPIES = ("consolidated*", "original/*", "onnx/*", "openvino/*", "metal/*", "*.fp16.safetensors")


def is_hub_name(where: str | os.PathLike[str]) -> bool:
    """Whether `where` names a model of the Hub, and nothing on this disk."""
    match = NAME.fullmatch(str(where))
    if match is None or match["model"].endswith(FILES):
        return False
    return not os.path.lexists(where) and not Path(match["model"]).parent.exists()


def local_folder(where: str | os.PathLike[str], revision: str | None = None) -> Path:
    """The folder of a checkpoint: `where` itself, or the snapshot of a model of the Hub, downloaded where it is needed.

    Args:
        where: A path, or "org/name" or "org/name@revision".
        revision: A branch, a tag or a commit of the Hub; None is the branch "main".

    Returns:
        The path. That of a snapshot ends with its commit, so that it names these very files from then on.

    Raises:
        ValueError: A revision for a path on this disk, or two different ones.
        FileNotFoundError: The Hub has no such model or revision, or not for this token, or the extra is absent.
        OSError: The Hub cannot be reached, and the cache does not have the model.
    """
    if not is_hub_name(where):
        if revision is not None:
            raise ValueError(f"revision={revision!r} is for a model of the Hub, and {where} is a path.")
        return Path(where)
    match = NAME.fullmatch(str(where))
    assert match is not None
    model, named = match["model"], match["revision"]
    if revision is not None and named not in (None, revision):
        raise ValueError(f"{where} names the revision {named!r}, and revision={revision!r} is another.")
    if find_spec("huggingface_hub") is None:
        reason = "There is no such checkpoint folder; to read it from the Hub, install the extra: fnmodels[hub]"
        raise FileNotFoundError(errno.ENOENT, reason, str(where))
    return _snapshot(model, revision or named)


def name_of_snapshot(folder: str | os.PathLike[str]) -> str | None:
    """ "org/name" of a folder in the cache of huggingface_hub; None for any other path."""
    match = re.search(r"models--([\w.-]+?)--([\w.-]+)/snapshots/[^/]+$", Path(folder).as_posix())
    return match and f"{match[1]}/{match[2]}"


def _snapshot(model: str, revision: str | None) -> Path:
    from huggingface_hub import errors, snapshot_download

    name = model if revision is None else f"{model}@{revision}"
    try:
        folder = snapshot_download(
            model, revision=revision, allow_patterns=list(NEEDED), ignore_patterns=list(OTHER_COPIES)
        )
    except errors.GatedRepoError as error:
        reason = "The Hub lets nobody read this model who has not accepted its terms: accept them, then set HF_TOKEN"
        raise FileNotFoundError(errno.ENOENT, reason, name) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        reason = "There is no such checkpoint folder, and the Hub has no such model or revision for this token"
        raise FileNotFoundError(errno.ENOENT, reason, name) from error
    except errors.LocalEntryNotFoundError as error:
        reason = (
            "There is no such checkpoint folder. The Hub cannot be reached (or HF_HUB_OFFLINE is set), and its cache "
            "has no complete copy of such a model"
        )
        raise OSError(errno.ENETUNREACH, reason, name) from error
    except (OSError, vars(errors)["HTTPError"]) as error:  # of the HTTP client, which differs by release
        if getattr(error, "errno", None) is not None:  # the disk's own: full, not writable
            raise
        reason = f"There is no such checkpoint folder, and the Hub cannot be reached: {error}"
        raise OSError(errno.ENETUNREACH, reason, name) from error
    return Path(folder)
