"""The storages of a slab: made one a tensor, and unmapped after the last of them."""

from __future__ import annotations

import threading

import pytest
import torch

from broker.devices.base import Mapping
from broker.errors import UsageError
from engine_client import storages as storages_module
from engine_client.storages import (
    DTYPES,
    SlabStorages,
    any_storage_lives,
    imports,
    is_shared_address,
    torch_device,
)

CPU = torch.device("cpu")


class HostMemory(Mapping):
    """A mapping that is ordinary memory and counts how often it was closed."""

    def __init__(self, nbytes: int) -> None:
        self._tensor = torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)
        self.address = self._tensor.data_ptr()
        self.nbytes = nbytes
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def memory() -> HostMemory:
    return HostMemory(4096)


@pytest.fixture
def storages(memory: HostMemory) -> SlabStorages:
    made = SlabStorages(memory, CPU)
    made.describe(DTYPES["uint8"], [16], [1], [0, 512, 1024, 1536])
    return made


def test_each_storage_begins_at_its_offset_and_is_as_large_as_its_tensor(
    memory: HostMemory, storages: SlabStorages
) -> None:
    """Four descriptions become four storages of 16 bytes at the four offsets."""
    tensors = storages.make(range(4))
    assert [t.data_ptr() - memory.address for t in tensors] == [0, 512, 1024, 1536]
    assert [t.untyped_storage().nbytes() for t in tensors] == [16] * 4
    assert tensors[1].tolist() == list(range(16))
    assert storages.make_one(3).data_ptr() - memory.address == 1536
    assert storages.whole().numel() == 4096
    storages.close()


def test_a_later_group_does_not_disturb_an_earlier_one(storages: SlabStorages) -> None:
    """Descriptions are kept by number, whatever is described after them."""
    numbers = storages.describe(DTYPES["int16"], [2, 3], [1, 2], [10, 600])
    assert list(numbers) == [4, 5]
    first, last = storages.make([0, 5])
    assert (first.dtype, first.shape) == (torch.uint8, (16,))
    assert (last.dtype, last.shape, last.stride()) == (torch.int16, (2, 3), (1, 2))
    assert last.untyped_storage().nbytes() == 12
    storages.close()


def test_the_mapping_is_closed_after_the_last_storage_died_and_not_before(
    memory: HostMemory, storages: SlabStorages
) -> None:
    """Closing with one view alive closes nothing; its death closes the mapping, once."""
    view = storages.make(range(4))[2][3:5]
    assert storages.live_count() == 1
    storages.close()
    assert memory.closed == 0
    assert view.tolist() == [3, 4]
    del view
    assert memory.closed == 1


def test_the_mapping_stays_open_until_close_is_called(
    memory: HostMemory, storages: SlabStorages
) -> None:
    """Without live storages the mapping still waits for close, which may come twice."""
    storages.make(range(4))
    assert storages.live_count() == 0
    assert memory.closed == 0
    storages.close()
    storages.close()
    assert memory.closed == 1


def test_the_callback_comes_once_and_after_the_unmapping(memory: HostMemory) -> None:
    """on_last_release sees the mapping closed already."""
    seen: list[int] = []
    storages = SlabStorages(memory, CPU, lambda: seen.append(memory.closed))
    storages.describe(DTYPES["uint8"], [16], [1], [0])
    tensor = storages.make_one(0)
    storages.close()
    assert seen == []
    del tensor
    assert seen == [1]


def test_an_import_that_fails_half_way_leaves_the_count_right(
    memory: HostMemory, storages: SlabStorages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch refuses the second struct: what was exported and not imported is let go of."""
    storages.describe((7, 8, 1), [4], [1], [2048])  # kDLFloat8_e3m4, a dtype torch has not
    with pytest.raises((BufferError, RuntimeError)):
        storages.make([0, 4, 1])
    with pytest.raises((BufferError, RuntimeError)):
        storages.make_one(4)
    assert storages.live_count() == 0
    storages.close()
    assert memory.closed == 1


def test_a_storage_may_die_while_an_exception_is_on_its_way(storages: SlabStorages) -> None:
    """The exception that unwinds a half-built expression is not lost to the storage's death."""
    with pytest.raises(ZeroDivisionError):
        torch.add(storages.make_one(0), 1 // 0)
    assert storages.live_count() == 0
    storages.close()


def test_two_storages_of_one_number_are_counted_apart(
    memory: HostMemory, storages: SlabStorages
) -> None:
    """The first's death does not count for the second."""
    first, second = storages.make_one(1), storages.make_one(1)
    del first
    assert storages.live_count() == 1
    storages.close()
    assert memory.closed == 0
    assert second.tolist() == list(range(16))
    del second
    assert memory.closed == 1


def test_a_closed_slab_makes_nothing_more(storages: SlabStorages) -> None:
    """Making a storage after close is refused with what to do."""
    storages.close()
    with pytest.raises(UsageError, match="released: acquire them again"):
        storages.make_one(0)
    with pytest.raises(UsageError, match="released: acquire them again"):
        storages.make([0])
    assert storages.live_count() == 0


def test_storages_dying_in_many_threads_close_the_mapping_once(memory: HostMemory) -> None:
    """Eight threads drop the last tensors at the same moment."""
    count = 800
    storages = SlabStorages(memory, CPU)
    storages.describe(DTYPES["uint8"], [16], [1], [0] * count)
    tensors = storages.make(range(count))
    shares = [tensors[i::8] for i in range(8)]
    del tensors
    storages.close()
    start = threading.Barrier(8)

    def drop(share: list[torch.Tensor]) -> None:
        start.wait()
        while share:
            share.pop()

    threads = [threading.Thread(target=drop, args=(share,)) for share in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert memory.closed == 1


def test_addresses_of_a_slab_are_known_until_it_is_unmapped(
    memory: HostMemory, storages: SlabStorages
) -> None:
    """is_shared_address holds for the first and last byte, while the slab is mapped."""
    tensor = storages.make_one(0)
    assert any_storage_lives()
    storages.close()
    assert any_storage_lives()
    assert is_shared_address(memory.address)
    assert is_shared_address(memory.address + memory.nbytes - 1)
    assert not is_shared_address(memory.address + memory.nbytes)
    del tensor
    assert not is_shared_address(memory.address)


def test_which_dtypes_torch_imports_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal is remembered as well as a success, and no dtype of another kind passes."""
    monkeypatch.setattr(storages_module, "_imported", {})
    monkeypatch.setitem(DTYPES, "float64", (7, 8, 1))
    monkeypatch.setitem(DTYPES, "int64", DTYPES["uint64"])
    assert [imports(dtype) for dtype in ("float32", "float64", "int64")] == [True, False, False]
    monkeypatch.undo()
    monkeypatch.setattr(storages_module, "_imported", {"float64": False})
    assert not imports("float64")


def test_platforms_have_torch_devices() -> None:
    """The simulated device is the CPU; ROCm's devices are called cuda by torch, too."""
    assert torch_device("simulated") == CPU
    assert torch_device("cuda", 3) == torch_device("rocm", 3) == torch.device("cuda", 3)
    with pytest.raises(UsageError, match="platform 'abacus'"):
        torch_device("abacus")
