"""`python -m train.flow`: see train/commands/flow.py."""

import sys

from train.commands.flow import main

if __name__ == "__main__":
    sys.exit(main())
