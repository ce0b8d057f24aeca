"""`python -m memfit`."""

import sys

from memfit.commands import main

sys.exit(main())
