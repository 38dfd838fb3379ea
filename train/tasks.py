"""`python -m train.tasks`: see train/commands/tasks.py."""

import sys

from train.commands.tasks import main

if __name__ == "__main__":
    sys.exit(main())
