"""`python -m train.server`: see train/server/command.py."""

import sys

from .command import main

sys.exit(main())
