"""A copy of a run behind a URL (`--mirror s3://bucket/runs/a`): uploaded in the background, each saved step complete or
not there.

The file that lists a step's files with their digests is uploaded last and removed first, so that a step without it is
none. A machine that takes over downloads the newest step whose digests agree.
"""

from .places import check_writable, complete_steps
from .restore import restore
from .upload import Mirror, mirrored

__all__ = ["Mirror", "check_writable", "complete_steps", "mirrored", "restore"]
