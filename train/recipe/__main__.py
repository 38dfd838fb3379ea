"""`python -m train.recipe`: see train/recipe/run.py."""

import sys

from .run import main

sys.exit(main())
