"""What the platform check looks with: the machine, drivers in child processes, torch's build."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from broker.platform_probe import DriverAnswer, Probe, TorchBuild, ask_drivers

FAKE_DRIVER = r"""
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int setting(const char *name) {
    const char *text = getenv(name);
    return text ? atoi(text) : 0;
}
static int initialise(void) {
    if (setting("FAKE_HANG")) pause();
    if (setting("FAKE_CRASH")) abort();
    if (setting("FAKE_CHATTER")) write(1, "hello from the driver\n", 22);
    return setting("FAKE_CODE");
}
static int count(int *devices) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    *devices = visible && !*visible ? 0 : setting("FAKE_DEVICES");
    return 0;
}
int cuInit(unsigned flags) { return initialise(); }
int cuDeviceGetCount(int *devices) { return count(devices); }
int cuDriverGetVersion(int *version) { *version = 12080; return 0; }
int cuGetErrorName(int code, const char **name) {
    if (code != 999) return 1;
    *name = "CUDA_ERROR_UNKNOWN";
    return 0;
}
int hipInit(unsigned flags) { return initialise(); }
int hipGetDeviceCount(int *devices) { return count(devices); }
int hipDriverGetVersion(int *version) { *version = 70125424; return 0; }
const char *hipGetErrorName(int code) { return "hipErrorUnknown"; }
"""
FOUND = [
    DriverAnswer(
        "nvidia",
        "libcuda.so.1",
        devices=3,
        version=12080,
        undescribed=(
            "cuDeviceGetUuid_v2: libcuda.so.1 has no such function; the driver is too old"
        ),
    ),
    DriverAnswer(
        "amd",
        "libamdhip64.so.7",
        devices=3,
        version=70125424,
        undescribed=(
            "hipDeviceGetUuid: libamdhip64.so.7 has no such function; the driver is too old"
        ),
    ),
]
Ask = Callable[..., "list[DriverAnswer]"]


@pytest.fixture(scope="session")
def fake_drivers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both vendors' libraries, which do as the FAKE_… variables say."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the fake drivers")
    folder = tmp_path_factory.mktemp("drivers")
    source = folder / "driver.c"
    source.write_text(FAKE_DRIVER)
    library = folder / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", library, source], check=True)
    shutil.copy(library, folder / "libamdhip64.so.7")
    return folder


@pytest.fixture
def ask(fake_drivers: Path) -> Ask:
    def ask(deadline: float = 30.0, **settings: str) -> list[DriverAnswer]:
        environ = {"LD_LIBRARY_PATH": str(fake_drivers), **settings}
        return list(ask_drivers(environ, deadline))

    return ask


def test_drivers_are_asked(ask: Ask) -> None:
    """Both vendors' drivers say how many devices they have and of what version they are.

    Why these cannot say more about them is in the answer.
    """
    assert ask(FAKE_DEVICES="3") == FOUND


def test_children_see_the_environment_given(ask: Ask) -> None:
    """What hides a device from the child is what was passed, not what this process has."""
    hidden = ask(FAKE_DEVICES="3", CUDA_VISIBLE_DEVICES="")
    assert [answer.devices for answer in hidden] == [0, 0]
    assert [answer.failure for answer in hidden] == ["", ""]


def test_no_device_is_no_failure(ask: Ask) -> None:
    """The drivers' code for "no device" (100) means none, not a broken driver."""
    assert ask(FAKE_CODE="100") == [
        DriverAnswer("nvidia", "libcuda.so.1"),
        DriverAnswer("amd", "libamdhip64.so.7"),
    ]


def test_failing_driver(ask: Ask) -> None:
    """A driver's error is given with the call, the code and the driver's own name for it."""
    assert ask(FAKE_CODE="999") == [
        DriverAnswer(
            "nvidia",
            "libcuda.so.1",
            "cuInit failed with code 999 (CUDA_ERROR_UNKNOWN)",
            "driver-failed",
            code=999,
        ),
        DriverAnswer(
            "amd",
            "libamdhip64.so.7",
            "hipInit failed with code 999 (hipErrorUnknown)",
            "driver-failed",
            code=999,
        ),
    ]


def test_failure_without_a_name(ask: Ask) -> None:
    """A code the driver itself does not know is still reported."""
    assert ask(FAKE_CODE="7")[0].failure == "cuInit failed with code 7 (unknown to the driver)"


def test_crashing_driver(ask: Ask) -> None:
    """A driver that crashes takes only the child with it."""
    answers = ask(FAKE_CRASH="1")
    failure = "it crashed while it was initialising (exit status -6)"
    assert [(answer.failure, answer.reason) for answer in answers] == [
        (failure, "driver-crashed")
    ] * 2


def test_hanging_driver(ask: Ask) -> None:
    """A driver that hangs costs the deadline once, though both hang, and no child is left."""
    before = children()
    start = time.monotonic()
    answers = ask(deadline=0.5, FAKE_HANG="1")
    assert time.monotonic() - start < 15
    failure = "it has not initialised within 0.5 seconds"
    assert [(answer.failure, answer.reason) for answer in answers] == [(failure, "driver-hung")] * 2
    for thread in threading.enumerate():
        if thread.name == "reap-driver-child":
            thread.join(10)
    assert children() == before


def children() -> str:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text()


def test_chattering_driver(ask: Ask) -> None:
    """A library that writes to standard output is reported, not believed."""
    answer = ask(FAKE_CHATTER="1", FAKE_DEVICES="3")[0]
    assert answer.reason == "driver-failed"
    assert answer.failure.startswith("its answer is unintelligible (b'hello from the driver")
    assert answer.devices == 0


def test_library_that_is_no_driver(fake_drivers: Path, tmp_path: Path) -> None:
    """A library without the driver's calls, or no library at all, is named."""
    (tmp_path / "libcuda.so.1").write_text("not even ELF")
    shutil.copy(_any_library(), tmp_path / "libamdhip64.so.7")
    nvidia, amd = ask_drivers({"LD_LIBRARY_PATH": str(tmp_path)}, 30)
    assert nvidia.library == ""
    assert nvidia.failure.startswith("libcuda.so.1 cannot be loaded (")
    assert amd.failure.startswith("libamdhip64.so.7 is not a driver (")
    assert (nvidia.reason, amd.reason) == ("driver-failed", "driver-failed")


def _any_library() -> str:
    """A shared library that is no GPU driver: one that this interpreter has loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split()[-1]
        if path.endswith(".so") and "lib-dynload" in path:
            return path
    pytest.skip("this Python loads no extension modules from files")


def test_no_driver(tmp_path: Path) -> None:
    """Without any library there is neither a driver nor a failure."""
    program = "import json; print(json.dumps({'library': '', 'failure': ''}))"
    child = tmp_path / "child.py"
    child.write_text(program)
    assert ask_drivers(os.environ, 30, child) == (DriverAnswer("nvidia"), DriverAnswer("amd"))


def test_child_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that may not start children says so instead of failing."""
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    answers = ask_drivers(os.environ, 30)
    assert [answer.reason for answer in answers] == ["driver-not-asked"] * 2
    assert answers[0].failure == (
        "a child process to ask it in cannot be started "
        "([Errno 2] No such file or directory: '/nowhere/python')"
    )


def test_torch_is_not_imported() -> None:
    """Its build is read from its version file by a process that never imports it."""
    program = (
        "import sys, json\n"
        "from broker.platform_probe import Probe\n"
        "build = Probe().torch_build()\n"
        "print(json.dumps([build.version, build.cuda, build.hip, build.xpu, "
        "'torch' in sys.modules, 'zmq' in sys.modules]))\n"
    )
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, check=True, timeout=30)
    import torch

    *build, has_torch, has_zmq = json.loads(result.stdout)
    assert build == [torch.__version__, torch.version.cuda, torch.version.hip, torch.version.xpu]
    assert not has_torch
    assert not has_zmq


def test_imported_torch_is_asked_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is loaded counts, not what lies on the disk."""
    loaded = ModuleType("torch")
    loaded.version = ModuleType("torch.version")  # type: ignore[attr-defined]
    vars(loaded.version).update(__version__="9.9+rocm", hip="9.1", cuda=None)
    monkeypatch.setitem(sys.modules, "torch", loaded)
    assert Probe().torch_build() == TorchBuild("9.9+rocm", hip="9.1")


@pytest.mark.parametrize(
    ("text", "build"),
    [
        (
            (
                "from typing import Optional\n__version__ = '2.9.0+cu128'\ndebug = False\n"
                "cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n"
            ),
            TorchBuild("2.9.0+cu128", cuda="12.8"),
        ),
        ("__version__ = '2.9.0'\nhip = '7.1.2'\ncuda = 12\n", TorchBuild("2.9.0", hip="7.1.2")),
        ("cuda = compute()\n", TorchBuild("of unknown version")),
        ("this is (not Python", None),
        (None, None),
    ],
)
def test_version_files(
    text: str | None, build: TorchBuild | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old, new and broken version files give what they say, and never run."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('imported')")
    if text is not None:
        (tmp_path / "torch" / "version.py").write_text(text)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert Probe().torch_build() == build


def test_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch there is no build."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(sys, "path", [])
    assert Probe().torch_build() is None


def test_pci_bus(tmp_path: Path) -> None:
    """GPUs are found on the bus by class: displays and accelerators, no network cards."""
    for name, kind, vendor in [
        ("0000:01:00.0", "0x030200", "0x10de"),
        ("0000:02:00.0", "0x120000", "0x1002"),
        ("0000:03:00.0", "0x020000", "0x8086"),
    ]:
        folder = tmp_path / "sys/bus/pci/devices" / name
        folder.mkdir(parents=True)
        (folder / "class").write_text(kind + "\n")
        (folder / "vendor").write_text(vendor + "\n")
    probe = Probe()
    probe.root = tmp_path
    assert probe.pci_gpus() == {"0x10de", "0x1002"}
    assert probe.read("/sys/bus/pci/devices/0000:03:00.0/vendor") == "0x8086\n"
    assert probe.exists("/sys/bus/pci/devices")
    assert not probe.exists("/dev/dxg")
    assert probe.read("/nothing") == ""


def test_no_pci_bus(tmp_path: Path) -> None:
    """A machine without a PCI bus has no GPU on it."""
    probe = Probe()
    probe.root = tmp_path
    assert probe.pci_gpus() == frozenset()


def test_this_machine() -> None:
    """The real looks agree with this interpreter."""
    probe = Probe()
    assert probe.system() == sys.platform
    assert probe.machine() == os.uname().machine
    assert probe.environ() is os.environ


def test_sealing_works_here() -> None:
    """On Linux memory files can be sealed, and trying leaves no descriptor behind."""
    before = sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names only
    assert Probe().sealing_failure() == ""
    assert sorted(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_sealing_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel without memory files, or without sealing, is described in its own words."""

    def no_memfd(name: str, flags: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", no_memfd)
    assert Probe().sealing_failure() == (
        "a sealed memory file cannot be made and reopened (Function not implemented)"
    )
    monkeypatch.delattr(os, "memfd_create")
    assert Probe().sealing_failure() == "this Python was built without memfd_create"


def test_named_libraries(fake_drivers: Path) -> None:
    """A test's own library takes the place of one vendor's, and the other vendor's is absent."""
    environ = {
        "WEIGHT_BROKER_HIP_LIBRARY": str(fake_drivers / "libcuda.so.1"),
        "LD_LIBRARY_PATH": str(fake_drivers),
        "FAKE_DEVICES": "1",
    }
    nvidia, amd = ask_drivers(environ, 30)
    assert nvidia == DriverAnswer("nvidia")
    assert (amd.library, amd.devices) == (str(fake_drivers / "libcuda.so.1"), 1)


def test_imports_where_there_is_no_linux() -> None:
    """The check itself can be imported, and refuses, where Linux's modules are missing."""
    program = (
        "import sys\n"
        "sys.modules['fcntl'] = None\n"
        "sys.platform = 'win32'\n"
        "from broker import check_ipc_platform_support\n"
        "try:\n"
        "    check_ipc_platform_support(where='engine')\n"
        "except Exception as error:\n"
        "    print(error.platform)\n"
    )
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, check=True, timeout=30)
    assert result.stdout == b"windows\n"
