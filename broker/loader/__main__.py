"""`python -m broker.loader SESSION JOB FOLDER`: started by the broker only."""

import gc
import sys

gc.disable()  # what imports make stays; looking for garbage in it is a tenth of a small load

from broker.loader.worker import main  # noqa: E402

gc.freeze()
gc.enable()

sys.exit(main(sys.argv[1:]))
