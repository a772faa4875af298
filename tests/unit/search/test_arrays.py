from __future__ import annotations

import contextlib
import errno
from pathlib import Path

import numpy as np
import pytest

from genius_search.errors import ArtifactMismatch, ArtifactMissing
from genius_search.index.writer import append_rows
from genius_search.search.vectors import Expected, open_array


def test_whatever_bit_of_a_header_flips_the_array_is_refused_or_read_as_it_was(tmp_path):
    path = tmp_path / "a.npy"
    values = np.arange(20, dtype=np.int32).reshape(10, 2)
    np.save(path, values)
    whole = path.read_bytes()
    for bit in range(8 * (len(whole) - values.nbytes)):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with contextlib.suppress(ArtifactMismatch):
            assert np.array_equal(open_array(path, Expected("i4", (10, 2))), values)


@pytest.mark.parametrize("length", [0, 5, 60, 128, 140])
def test_a_truncated_file_is_refused_at_any_length(tmp_path, length):
    path = tmp_path / "a.npy"
    np.save(path, np.arange(5, dtype=np.int32))
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ArtifactMismatch, match=r"a\.npy"):
        open_array(path, Expected("i4", (None,)))


def test_arrays_that_genius_does_not_write_are_refused(tmp_path):
    foreign = {
        "objects": np.array([{}], dtype=object),
        "turned": np.asfortranarray(np.ones((3, 2), dtype=np.int32)),
        "of_another_type": np.zeros(3, dtype=np.float32),
        "big_endian": np.arange(3, dtype=">i4"),
        "cube": np.zeros((1, 1, 1), dtype=np.int32),
    }
    for name, values in foreign.items():
        np.save(tmp_path / name, values)
        with pytest.raises(ArtifactMismatch, match=rf"{name}\.npy"):
            open_array(tmp_path / f"{name}.npy", Expected("i4", (None,)))
    with pytest.raises(ArtifactMissing, match="nowhere"):
        open_array(tmp_path / "nowhere.npy", Expected("i4", (None,)))


@pytest.mark.parametrize(
    "array", [np.arange(5), np.ones((3, 2), dtype=np.float16), np.empty((0, 4), np.int8)]
)
def test_parts_of_an_array_are_saved_as_numpy_saves_it(tmp_path, array):
    for rows in (array[:1], array[1:1], array[1:]):
        append_rows(tmp_path / "ours.npy", rows)
    np.save(tmp_path / "theirs.npy", array)
    assert (tmp_path / "ours.npy").read_bytes() == (tmp_path / "theirs.npy").read_bytes()


def test_an_array_that_the_disk_has_no_room_for_says_so():
    with pytest.raises(OSError, match="No space left") as error:
        append_rows(Path("/dev/full"), np.zeros(100_000))
    assert error.value.errno == errno.ENOSPC
