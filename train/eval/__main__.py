"""`python -m train.eval`: loss, perplexity and bits per byte of texts."""

import sys

from .command import main

sys.exit(main())
