"""Detection of user files that shadow the packages `fnmodels`, `params` and `train` on the import path.

`params` and `train` are ordinary words: a `train.py` in the working folder takes precedence over the installed package.
The packages are installed side by side (wheel, checkout and editable install alike), so the right one is the folder
beside the package that checks. Nothing is imported for the check, since that would run the shadowing file.

`train` requires "fnmodels" and "params", `params` requires "fnmodels". `fnmodels` needs neither and only warns, because
a user's own train.py beside the models alone is fine. `params` and `train` run this file by its path (`runpy`), before
any other import, because `fnmodels` itself may be the package that is shadowed.
"""

import importlib.util
import os
import sys
import warnings


def _location(name: str) -> str | None:
    """The file (or folder, for a namespace package) that `import name` would load; None if there is none."""
    module = sys.modules.get(name)
    if module is not None:  # imported already, perhaps partially; find_spec fails for a module without a spec
        file, folders = getattr(module, "__file__", None), getattr(module, "__path__", None)
    elif spec := importlib.util.find_spec(name):
        file, folders = spec.origin if spec.has_location else None, spec.submodule_search_locations
    else:
        return None
    return file or next(iter(folders or ()), None)


def shadow(package_file: str, name: str) -> str | None:
    """A sentence naming the file that shadows the package `name` beside `package_file`; None if nothing does."""
    installed = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(package_file))), name)
    location = _location(name)
    if location is None or os.path.realpath(os.path.dirname(location)) == os.path.realpath(installed):
        return None
    if not os.path.isdir(installed):  # only one of the three packages was copied here: nothing is shadowed
        return None
    return (
        f"{location} hides the package `{name}` that was installed with fnmodels ({installed}): `import {name}` gives "
        "the former. Rename it, or start Python with -P, which leaves the working folder out of the search; the "
        "commands fnmodels-train and fnmodels-sample never search it."
    )


def require(package_file: str, *names: str) -> None:
    """Raise ImportError, which names the file, if another module shadows one of the packages `names`."""
    for name in names:
        if sentence := shadow(package_file, name):
            raise ImportError(sentence, name=name)


def warn_shadowed(package_file: str, *names: str) -> None:
    """Warn, with the same sentence, if another module shadows one of the packages `names`."""
    for name in names:
        if sentence := shadow(package_file, name):
            warnings.warn(sentence, RuntimeWarning, stacklevel=3)
