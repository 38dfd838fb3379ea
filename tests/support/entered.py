"""Which functions of a package a call enters: what tells two models apart whose tests would try the same code."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any


def entered(call: Callable[[], object], package: ModuleType, folders: tuple[str, ...]) -> set[str]:
    """The functions with code in some folders of a package that a call enters, as "ops/mlp.py gated_mlp".

    The call is made twice, and the second one counts: what caches keep would be of whichever model comes first.
    """
    root = Path(str(package.__file__)).parent
    within = tuple(f"{root / folder}/" for folder in folders)
    codes = set[CodeType]()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            codes.add(frame.f_code)

    call()
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    ours = (code for code in codes if code.co_filename.startswith(within))
    return {f"{Path(code.co_filename).relative_to(root)} {code.co_qualname}" for code in ours}
