"""`python -m train.cache`: see train/commands/cache.py."""

import sys

from train.commands.cache import main

if __name__ == "__main__":
    sys.exit(main())
