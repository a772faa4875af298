"""Features on disk: round trips and refusals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genius_search.data.features import ROW, Features, Shard, to_float16, write_shard
from genius_search.errors import ArtifactMismatch, BadData
from genius_search.writing import ArtifactWriter

DIM = 4


def one_image(text_dim=DIM):
    """A shard of one image."""
    rows = np.array([(7, 0, -1, 0, -1, 5)], ROW)
    return Shard(rows, np.ones((1, DIM), np.float16), np.zeros((0, text_dim), np.float16))


@given(
    presence=st.lists(st.sampled_from([(1, 0), (0, 1), (1, 1)]), min_size=1, max_size=20),
    shard_rows=st.integers(1, 7),
    seed=st.integers(0, 100),
)
def test_gathered_features_equal_a_dense_table_with_zeros_for_what_is_absent(
    make_features, presence, shard_rows, seed
):
    random = np.random.default_rng(seed)
    dense = random.standard_normal((2, len(presence), DIM)).astype(np.float16).astype(np.float32)
    present = np.array(presence, dtype=bool)
    rows = [
        [vector if has else None for vector, has in zip(dense[side], present[:, side], strict=True)]
        for side in (0, 1)
    ]
    ids = random.permutation(1000)[: len(presence)].tolist()
    features = make_features(ids, *rows, shard_rows=shard_rows, dim=DIM)
    dense *= present.T[:, :, None]
    chosen = random.integers(len(presence), size=12)
    batch = features.gather(chosen)
    assert np.array_equal(batch.image, dense[0][chosen])
    assert np.array_equal(batch.text, dense[1][chosen])
    assert np.array_equal(batch.has_image, present[chosen, 0])
    assert np.array_equal(batch.has_text, present[chosen, 1])
    assert np.array_equal(batch.total(), (dense[0] + dense[1])[chosen])
    assert features.ids.tolist() == ids
    parts = list(features.batches(3))
    assert np.array_equal(np.concatenate([part.image for _, part in parts]), dense[0])
    assert np.concatenate([rows for rows, _ in parts]).tolist() == list(range(len(ids)))


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e6])
def test_features_that_16_bits_cannot_hold_are_refused(bad):
    with pytest.raises(BadData, match="not finite or too large"):
        to_float16(np.array([[0, 1], [bad, 1]], dtype=np.float32))


def test_features_of_two_widths_have_no_one_width(tmp_path):
    writer = ArtifactWriter(
        tmp_path / "some", kind="features", config={"columns": ROW.names}, inputs={}
    )
    write_shard(writer.path, "shard-0", one_image(DIM + 1))
    writer.finish()
    with pytest.raises(ArtifactMismatch, match="must have the same width"):
        _ = Features.open(tmp_path / "some").dim


def test_a_shard_reaches_the_disk_before_it_counts_as_finished(tmp_path, disk):
    write_shard(tmp_path, "shard-0", one_image())
    folder = tmp_path / "shard-0"
    in_place = disk.index(("move", folder.stat().st_ino))
    assert (
        max(disk.index(("sync", path.stat().st_ino)) for path in (folder, *folder.iterdir()))
        < in_place
    )
    assert disk[in_place + 1 :] == [("sync", tmp_path.stat().st_ino)]
