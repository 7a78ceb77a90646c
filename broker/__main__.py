"""`python -m broker` is `weight-broker`."""

import sys

from broker.cli import main

sys.exit(main())
