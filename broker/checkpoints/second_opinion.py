"""The safetensors library reads the headers too, before a byte is copied.

Our own reader is the stricter one (tests/checkpoints/test_against_library.py), so this refuses
nothing today; it is there for the day the format changes and for a mistake of ours. The only module
of this package that imports the library, and the loader the only process. Having checked a header,
the library imports numpy whatever it was asked for, which is half the processor time of a small
load; it is told that there is none, and has done its part.

It maps the file: one that is cut short at this very moment ends the loader by SIGBUS, which the
broker tells like any other death of a loader. Our own reading has no such moment.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError, safe_open

from broker.checkpoints.faults import load_failed, quoted

_log = logging.getLogger(__name__)


def require_library_agrees(descriptor: int, file: str) -> None:
    """Let the library check an open file's header. Maps the file, touches no weight.

    Raises:
        LoadFailed: "not_safetensors", with the library's own words.
    """
    try:
        with _no_import_of("numpy"), safe_open(f"/proc/self/fd/{descriptor}", framework="numpy"):
            return
    except ModuleNotFoundError as error:
        _log.debug("%s is sound, the library says, and then: %s", file, error)
    except (SafetensorError, OSError) as error:
        raise load_failed(
            "not_safetensors",
            f"the safetensors library refuses {quoted(file)}: {quoted(str(error))[1:-1]}; download "
            "it again, or write it with a newer version of the library",
            file=file,
        ) from error


@contextmanager
def _no_import_of(module: str) -> Iterator[None]:
    """Have `import` find no such module meanwhile, in no thread, unless it is imported already.

    That is what None in its place means (The Python Language Reference, 5.3.1, "The module cache").
    """
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[module]
