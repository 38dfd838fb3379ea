"""The three packages check that they see each other, and not a file of the user's.

`params` and `train` are ordinary words: a `train.py` in the working folder comes before the installed package. Siblings
are installed side by side (wheel, checkout and editable install alike), so the right one is the folder beside the
package that asks. Nothing is imported to find out: running a stranger's file is what this is here to prevent.

    fnmodels/__init__.py, after its imports:
        _shadowing.warn_shadowed(__file__, "params", "train")
    params/__init__.py and train/__init__.py, before every other import of ours:
        from pathlib import Path
        from runpy import run_path
        run_path(str(Path(__file__).parents[1] / "fnmodels" / "_shadowing.py"))["require"](__file__, "fnmodels")

(`train` requires "fnmodels" and "params".) A package that needs its sibling raises; `fnmodels` needs neither and warns,
for whoever names a script of his own train.py and uses the models alone is doing nothing wrong. `params` imports
`fnmodels`, so that it need not warn of `train` a second time. `params` and `train` run this file by its path, before
any other import, because `fnmodels` itself may be the one that is hidden.
"""

import importlib.util
import os
import sys
import warnings


def _location(name: str) -> str | None:
    """The file, or for a package without one the folder, that `import name` gives; None where there is nothing."""
    module = sys.modules.get(name)
    if module is not None:  # imported already, perhaps half-way, and find_spec refuses a module without a spec
        file, folders = getattr(module, "__file__", None), getattr(module, "__path__", None)
    elif spec := importlib.util.find_spec(name):
        file, folders = spec.origin if spec.has_location else None, spec.submodule_search_locations
    else:
        return None
    return file or next(iter(folders or ()), None)


def shadow(package_file: str, name: str) -> str | None:
    """One sentence about the file that `import name` finds in place of the package beside `package_file`, or None."""
    own = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(package_file))), name)
    found = _location(name)
    if found is None or os.path.realpath(os.path.dirname(found)) == os.path.realpath(own):
        return None
    if not os.path.isdir(own):  # somebody copied one package out of the three: nothing is hidden
        return None
    return (
        f"{found} hides the package `{name}` that was installed with fnmodels ({own}): `import {name}` gives the "
        "former. Rename it, or start Python with -P, which leaves the working folder out of the search; the commands "
        "fnmodels-train and fnmodels-sample never search it."
    )


def require(package_file: str, *names: str) -> None:
    """Raises ImportError, which names the file, where something else would be imported as one of `names`."""
    for name in names:
        if sentence := shadow(package_file, name):
            raise ImportError(sentence, name=name)


def warn_shadowed(package_file: str, *names: str) -> None:
    """Warns, with the same sentence, where something else would be imported as one of `names`."""
    for name in names:
        if sentence := shadow(package_file, name):
            warnings.warn(sentence, RuntimeWarning, stacklevel=3)
