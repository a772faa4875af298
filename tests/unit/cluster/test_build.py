"""Building a cluster: finished shards are not built again, and every shard is an ordinary index."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from genius_search.cluster.build import Settings, build_cluster
from genius_search.cluster.searcher import MODEL, Searcher, read_cluster, shard_folder, shard_of
from genius_search.errors import ArtifactMismatch, ArtifactMissing, BadData, UsageError
from genius_search.index.index import Index


class Counting:
    """Creates shards in this process, records them, and fails before one of them."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.done: list[int] = []
        self.fail_at = fail_at

    def __call__(self, work, folder, numbers):
        for number in numbers:
            if len(self.done) == self.fail_at:
                raise KeyboardInterrupt
            work(folder, number)
            self.done.append(number)
            yield number


def test_each_shard_is_an_index_that_opens_alone(cluster_folder, single, cluster_settings):
    cluster = read_cluster(cluster_folder)
    shards = [Index.open(shard_folder(cluster_folder, number)) for number in range(3)]
    ids = [set(shard._snapshot.ids()) for shard in shards]
    for number, shard_ids in enumerate(ids):
        assert {shard_of(name, 3) for name in shard_ids} == {number}
    assert set().union(*ids) == set(single._snapshot.ids())
    assert cluster.items == sum(map(len, ids)) == len(Searcher.open(cluster_folder)) == 120
    checked = Searcher.open(cluster_folder).check()
    assert (checked.segments, checked.items) == (3, 120)
    assert sorted(path.name for path in cluster_folder.iterdir()) == [
        "cluster.json",
        "left-out.jsonl",
        "shards",
    ]
    hits = shards[1].search("a red kite", k=3)
    assert {hit.id for hit in hits} <= ids[1]
    with pytest.raises(ArtifactMissing, match="is a cluster"):
        Index.open(cluster_folder)
    with pytest.raises(UsageError, match="already"):
        build_cluster(cluster_folder, cluster_settings)


def test_a_killed_build_creates_only_what_is_missing(cluster_settings, tmp_path):
    first, again = Counting(fail_at=2), Counting()
    with pytest.raises(KeyboardInterrupt):
        build_cluster(tmp_path / "X", cluster_settings, run=first)
    with pytest.raises(ArtifactMissing):
        read_cluster(tmp_path / "X")
    with pytest.raises(UsageError, match="other settings"):
        build_cluster(tmp_path / "X", cluster_settings._replace(shards=4))
    assert build_cluster(tmp_path / "X", cluster_settings, run=again).items == 120
    assert (first.done, again.done) == ([0, 1], [2])
    (tmp_path / "X" / ".build").mkdir()  # as if the build was killed just before it ended
    assert build_cluster(tmp_path / "X", cluster_settings, run=Counting(fail_at=0)).items == 120
    assert not (tmp_path / "X" / ".build").exists()


def test_shards_share_codebooks_that_are_fitted_to_the_whole_pool(texts, tmp_path):
    (texts / "a.txt").write_bytes(b"\xff\xfe\x00broken")
    folder = tmp_path / "X"
    cluster = build_cluster(folder, Settings(str(texts), encoder="text:wordllama", shards=2))
    assert (cluster.model, cluster.items) == (MODEL, 24)
    left_out = [json.loads(line) for line in (folder / "left-out.jsonl").read_text().splitlines()]
    assert cluster.left_out == len(left_out)
    manifests = [Index.open(shard_folder(folder, n))._snapshot.manifest for n in range(2)]
    for manifest in manifests:
        assert manifest.model_fingerprint == cluster.model_fingerprint
        assert (manifest.embeddings, manifest.embedding_bits) == ("fused", 8)
    hit = Searcher.open(tmp_path / "X").search("a note about number 7", k=1)[0]
    assert hit.fields["name"].startswith("note")


def test_a_shard_may_be_empty(texts, tmp_path):
    folder = tmp_path / "X"
    cluster = build_cluster(folder, Settings(str(texts), encoder="text:wordllama", shards=40))
    searcher = Searcher.open(folder)
    assert cluster.items == len(searcher) == searcher.check().items == 24
    assert searcher.search("a note about number 7", k=1)[0].fields["name"].startswith("note")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": None}, UsageError, "one of a model"),
        ({"encoder": "small"}, UsageError, "one of a model"),
        ({"shards": 0}, UsageError, "--shards"),
        ({"pool": "/nowhere.jsonl"}, BadData, "nowhere"),
    ],
)
def test_impossible_settings_are_refused(cluster_settings, tmp_path, changes, error, message):
    with pytest.raises(error, match=message):
        build_cluster(tmp_path / "X", cluster_settings._replace(**changes))


def test_a_folder_with_other_files_remains_unchanged(cluster_settings, tmp_path):
    (tmp_path / "letter").touch()
    with pytest.raises(UsageError, match="other files"):
        build_cluster(tmp_path, cluster_settings)
    assert [path.name for path in tmp_path.iterdir()] == ["letter"]


@pytest.mark.parametrize("body", ["{}", "[]", '{"format": 2}', "nothing"])
def test_a_damaged_manifest_is_refused(tmp_path, body):
    Path(tmp_path / "cluster.json").write_text(body)
    with pytest.raises(ArtifactMismatch):
        read_cluster(tmp_path)
