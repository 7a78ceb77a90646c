"""`python -m broker.loader SESSION JOB FOLDER`: started by the broker only."""

import sys

from broker.loader.worker import main

sys.exit(main(sys.argv[1:]))
