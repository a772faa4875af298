"""Features on disk: round trips and refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genius_search.data.features import FeatureBatch, Features, LeftOut, Shard, write_shard
from genius_search.errors import ArtifactMismatch, BadData
from genius_search.writing import ArtifactWriter

DIM = 4


def one_shard(image, text, places):
    size = len(places)
    return Shard(
        ids=np.arange(size),
        variant=np.full(size, -1, np.int16),
        modality=np.zeros(size, np.int8),
        wanted=np.full(size, -1, np.int8),
        image_index=np.array([place[0] for place in places]),
        text_index=np.array([place[1] for place in places]),
        image=image,
        text=text,
    )


@settings(max_examples=40)
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
    assert np.array_equal(batch.image.numpy(), dense[0][chosen])
    assert np.array_equal(batch.text.numpy(), dense[1][chosen])
    assert np.array_equal(batch.has_image.numpy(), present[chosen, 0])
    assert np.array_equal(batch.has_text.numpy(), present[chosen, 1])
    assert np.array_equal(batch.total().numpy(), (dense[0] + dense[1])[chosen])
    assert features.ids.tolist() == ids
    assert len(features) == len(ids)
    parts = list(features.batches(3))
    assert torch.equal(torch.cat([part.image for _, part in parts]), torch.from_numpy(dense[0]))
    assert [i for rows, _ in parts for i in range(*rows.indices(10**6))] == list(range(len(ids)))
    shards = [FeatureBatch.of_shard(shard) for shard in features.shards()]
    assert torch.equal(torch.cat([shard.text for shard in shards]), torch.from_numpy(dense[1]))
    assert torch.equal(torch.cat([shard.has_text for shard in shards]), torch.from_numpy(present[:, 1]))


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e6])
def test_features_that_16_bits_cannot_hold_are_refused(tmp_path, bad):
    image = np.ones((2, DIM), dtype=np.float32)
    image[1, 2] = bad
    shard = one_shard(image, np.zeros((0, DIM), np.float32), [(0, -1), (1, -1)])
    with pytest.raises(BadData, match="image features are not finite or too large"):
        write_shard(tmp_path, 0, shard, [])
    assert not list(tmp_path.iterdir())


def test_left_out_records_are_listed_when_the_folder_is_opened(make_features, tmp_path):
    features = make_features([1], [np.ones(DIM)], [None], dim=DIM)
    writer = ArtifactWriter(tmp_path / "some", kind="features", config={}, inputs={})
    write_shard(writer.path, 0, next(features.shards()), [LeftOut(3, "a.jpg", "cut off")])
    writer.finish(facts={"rows": 1, "image_dim": DIM, "text_dim": DIM + 1})
    opened = Features.open(tmp_path / "some")
    assert opened.left_out == [LeftOut(3, "a.jpg", "cut off")]
    with pytest.raises(ArtifactMismatch, match="must have the same width"):
        _ = opened.dim


def test_a_shard_reaches_the_disk_before_it_counts_as_finished(tmp_path, disk):
    write_shard(tmp_path, 0, one_shard(np.zeros((1, DIM), np.float32), np.zeros((0, DIM)), [(0, -1)]), [])
    folder = tmp_path / "shard-000000"
    in_place = disk.index(("move", folder.stat().st_ino))
    assert max(disk.index(("sync", path.stat().st_ino)) for path in (folder, *folder.iterdir())) < in_place
    assert disk[in_place + 1 :] == [("sync", tmp_path.stat().st_ino)]
