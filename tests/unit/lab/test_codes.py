"""Room for the IDs of a pool."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest

from genius_search.lab.codes import _reserve


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="this system cannot reserve room")
def test_a_file_of_codes_has_its_room_on_the_disk_before_it_is_filled(tmp_path):
    path = tmp_path / "codes.npy"
    np.lib.format.open_memmap(path, mode="w+", dtype=np.int16, shape=(100_000, 9))
    _reserve(path)
    status = path.stat()
    assert status.st_blocks * 512 >= status.st_size
    assert not np.load(path).any()


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path, monkeypatch):
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    path = tmp_path / "codes.npy"
    path.write_bytes(bytes(10))
    with pytest.raises(OSError, match="No space left") as caught:
        _reserve(path)
    assert caught.value.filename == str(path)


def test_a_file_system_that_cannot_reserve_room_is_written_all_the_same(tmp_path, monkeypatch):
    def unable(*_: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", unable, raising=False)
    path = tmp_path / "codes.npy"
    path.write_bytes(bytes(10))
    _reserve(path)
    assert path.read_bytes() == bytes(10)
