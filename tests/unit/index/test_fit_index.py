"""Training on indexes that were created with an encoder alone."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from genius_search.cli import main
from genius_search.config import FusionConfig
from genius_search.errors import BadData, UsageError
from genius_search.index import fit
from genius_search.index.index import Index
from genius_search.recipe import preset
from research.mbeir_files import write_json_lines

ITEMS, SIGNAL, DIM = 400, 6, 24
TINY = preset("tiny")
SETTINGS = replace(
    TINY,
    quantizer=replace(
        TINY.quantizer, training=replace(TINY.quantizer.training, epochs=30.0, learning_rate=3e-3)
    ),
)
QUICK = replace(
    TINY,
    quantizer=replace(TINY.quantizer, training=replace(TINY.quantizer.training, max_steps=2)),
)
"""For tests of what becomes of a model, however good it is."""


def line(**entries):
    return json.dumps(entries) + "\n"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Queries and items that agree in a few numbers, and differ in louder ones, which training can ignore."""
    root = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    signal = random.normal(size=(ITEMS, SIGNAL))
    for name in ("query", "candidate"):
        noise = 1.2 * random.normal(size=(ITEMS, DIM - SIGNAL))
        features = np.concatenate([signal, noise], axis=1)
        features /= np.linalg.norm(features, axis=1, keepdims=True)
        (root / "features").mkdir(exist_ok=True)
        np.save(root / "features" / f"{name}_text_features.npy", features.astype(np.float32))
    pool = root / "cand_pool" / "global" / "mbeir_union_test_cand_pool.jsonl"
    queries = root / "query" / "train" / "mbeir_x_train.jsonl"
    pool.parent.mkdir(parents=True)
    queries.parent.mkdir(parents=True)
    write_json_lines(
        pool,
        (
            {
                "did": f"9:{n}",
                "modality": "text",
                "txt": f"item {n}",
                "src_content": f'{{"n": {n}}}',
            }
            for n in range(1, ITEMS + 1)
        ),
    )
    write_json_lines(
        queries,
        (
            {
                "qid": f"9:{n}",
                "query_modality": "text",
                "query_txt": f"query {n}",
                "pos_cand_list": [f"9:{n}"],
            }
            for n in range(1, ITEMS + 1)
        ),
    )
    return root


def test_pairs_are_of_the_right_items_in_every_segment(tmp_path, monkeypatch):
    random = np.random.default_rng(0)
    words = [
        f"{one}{two}" for one in ("sun", "rain", "snow", "fire", "wind") for two in "bcdfghklmn"
    ]
    items = [{"id": str(n), "text": " ".join(random.choice(words, 12))} for n in range(120)]
    index = Index.create(tmp_path / "i", items[:100], encoder="text:wordllama")
    index.add([*items[100:], {"id": "long", "text": " ".join(random.choice(words, 900))}])
    assert (len(index._snapshot.segments), index.info().passages > 1) == (2, True)
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(line(text=item["text"], id=item["id"]) for item in items))

    class Seen(Exception):
        pass

    def look(pairs, *_):
        batch = pairs.draw(0, 100, seed=0)
        asked = pairs.queries.gather(batch.query_rows).total()
        meant = pairs.candidates.gather(batch.candidate_rows).total()
        assert (np.vecdot(asked, meant) / np.linalg.norm(asked, axis=1)).min() > 0.9
        raise Seen

    monkeypatch.setattr(fit, "_train", look)
    with pytest.raises(Seen):
        index.train(file)


def create(data, folder):
    pool = data / "cand_pool" / "global" / "mbeir_union_test_cand_pool.jsonl"
    return Index.create(folder, pool, encoder=f"precomputed:{data / 'features'}")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Pictures with five captions each."""
    folder = tmp_path_factory.mktemp("pictures")
    random = np.random.default_rng(0)
    with (folder / "captions.jsonl").open("w") as file:
        for n in range(30):
            picture = Image.fromarray(random.integers(0, 256, (20, 24, 3), dtype=np.uint8))
            picture.save(folder / f"{n}.png")
            file.write(
                line(image=f"{n}.png", captions=[f"a red anchor {n} {other}" for other in "abcde"])
            )
    return folder


def test_training_replaces_the_model_of_an_index_in_place(data, tmp_path):
    index = create(data, tmp_path / "i")
    index.delete(["9:7"])
    reader = Index.open(tmp_path / "i")
    fitted = index.train(data, config=SETTINGS)
    assert fitted.kept
    assert fitted.after.at_5 > fitted.before.at_5 + 0.1
    assert (fitted.pairs, fitted.left_out, fitted.measured) == (ITEMS - 1, 1, 40)
    for handle in (index, reader, Index.open(tmp_path / "i")):
        assert handle.settings.rerank == "embeddings"
        assert not handle.model.has_generator
        assert handle._snapshot.num_alive == ITEMS - 1
        [item] = [one for one in handle._snapshot.segments[0].items.all() if one.id == "9:8"]
        assert (item.text, item.fields) == ("item 8", {"n": 8})
    assert index.check().items == ITEMS - 1
    assert sorted(path.name for path in (tmp_path / "i").glob("model*")) == ["model-3"]
    assert not (tmp_path / "i" / ".work").exists()


def test_codebooks_that_follow_a_trained_index_keep_its_fusion(data, tmp_path):
    index = create(data, tmp_path / "i")
    index.train(data, config=QUICK, force=True)
    fusion = {
        name: one
        for name, one in index.model.codebooks.weights.items()
        if name.startswith("fusion.")
    }
    assert fusion
    (segment,) = index._snapshot.segments
    before = {
        item.id: row
        for item, row in zip(
            segment.items.all(),
            segment.vectors(index.model.ranker)(segment.alive_rows()),
            strict=True,
        )
    }
    index.refit()
    (segment,) = index._snapshot.segments
    after = segment.vectors(index.model.ranker)(segment.alive_rows())
    expected = np.stack([before[item.id] for item in segment.items.all()])
    assert np.vecdot(after, expected).min() > 0.95  # what is stored is not fused once more
    kept = Index.open(tmp_path / "i").model.codebooks.weights
    assert all(np.array_equal(kept[name], one) for name, one in fusion.items())


def test_settings_without_a_fusion_to_train_are_refused(data, tmp_path):
    index = create(data, tmp_path / "i")
    settings = replace(TINY, quantizer=replace(TINY.quantizer, fusion=FusionConfig(kind="sum")))
    with pytest.raises(UsageError, match="sum"):
        index.train(data, config=settings)


def test_a_worse_model_changes_nothing_unless_forced(data, tmp_path):
    index = create(data, tmp_path / "i")
    index.train(data, config=SETTINGS)
    before = (tmp_path / "i" / "index.json").read_bytes()
    fitted = index.train(data, config=QUICK)
    assert not fitted.kept
    assert fitted.after.at_5 < fitted.before.at_5
    assert (tmp_path / "i" / "index.json").read_bytes() == before
    assert len(list((tmp_path / "i" / "segments").iterdir())) == 1
    assert index.check().items == ITEMS
    assert index.train(data, config=QUICK, force=True).kept


@pytest.mark.parametrize("fails", ["fit.sync_tree", "writer.write_manifest"])
def test_training_that_dies_leaves_the_old_model(data, tmp_path, monkeypatch, fails):
    index = create(data, tmp_path / "i")
    old = index.model.fingerprint
    with monkeypatch.context() as patch:
        patch.setattr(f"genius_search.index.{fails}", None)
        with pytest.raises(TypeError):
            index.train(data, config=QUICK, force=True)
    opened = Index.open(tmp_path / "i")
    assert opened.model.fingerprint == old
    assert opened.check().items == ITEMS
    assert opened.train(data, config=QUICK, force=True).kept
    assert [path.name for path in (tmp_path / "i").glob("model*")] == ["model-2"]


def test_a_log_of_queries_is_pairs(pictures, clip_folder, tmp_path, capsys):
    Index.create(tmp_path / "i", pictures, encoder=f"clip:{clip_folder}")
    log = tmp_path / "log.jsonl"
    log.write_text(
        "".join(line(text=f"red anchor {n % 30}", id=f"{n % 30}.png") for n in range(80))
        + "".join(line(text=f"blue anchor {n}", chosen=f"{n}.png") for n in range(10))
        + "".join(
            line(image=str(pictures / f"{n}.png"), id=[f"{n}.png", "gone.png"]) for n in range(20)
        )
        + line(text="nothing", id="gone.png")
    )
    arguments = ["fit", str(log), "--index", str(tmp_path / "i"), "--preset", "tiny", "--force"]
    assert main(arguments) == 0
    said, progress = capsys.readouterr()
    assert "encoding the items again, since embeddings of pictures with texts are" in progress
    assert "110 pairs, of which 1 were left out" in said
    assert "now uses the new model" in said
    assert main(["search", str(tmp_path / "i"), "red anchor 3"]) == 0


@pytest.mark.parametrize(
    ("written", "fact"),
    [
        ('{"text": "a"}', "needs an id"),
        ('{"id": "1.png"}', "needs a text"),
        ('{"id": "1.png", "image": 3}', "needs a text"),
        (
            '{"id": "1.png", "text": "a"}\n{"id": "x", "text": "b"}',
            r"1 pair for .*1 query names no item.*at least 100",
        ),
    ],
)
def test_pairs_that_cannot_be_used_are_refused(pictures, clip_folder, tmp_path, written, fact):
    index = Index.create(tmp_path / "i", pictures, encoder=f"clip:{clip_folder}")
    (tmp_path / "log.jsonl").write_text(written + "\n")
    with pytest.raises(BadData, match=fact):
        index.train(tmp_path / "log.jsonl")


def test_queries_without_ids_have_no_precomputed_features(data, tmp_path):
    index = create(data, tmp_path / "i")
    (tmp_path / "log.jsonl").touch()
    with pytest.raises(UsageError, match="looked up by id"):
        index.train(tmp_path / "log.jsonl")


def test_queries_are_told_apart_by_an_encoder_of_texts(sentence_folder, tmp_path):
    with (tmp_path / "pool.jsonl").open("w") as pool, (tmp_path / "log.jsonl").open("w") as log:
        for n in range(1, 101):
            words = " ".join(
                ["red", "green", "anchor", "ground"][n // 4**place % 4] for place in range(4)
            )
            pool.write(line(did=f"9:{n}", modality="text", txt=words, img_path=None))
            log.write(line(text=words, id=f"9:{n}"))
    index = Index.create(tmp_path / "i", tmp_path / "pool.jsonl", encoder=f"text:{sentence_folder}")
    assert index.train(tmp_path / "log.jsonl", config=TINY).before.at_5 > 0.5


def test_what_was_learned_is_trained_on_and_stays(sentence_folder, tmp_path):
    words = [
        " ".join(["red", "green", "anchor", "ground"][n // 4**p % 4] for p in range(4))
        for n in range(200)
    ]
    index = Index.create(tmp_path / "i", words, encoder=f"text:{sentence_folder}")
    index.learn_many(
        [{"text": text, "chosen": str((n + 100) % 200)} for n, text in enumerate(words)]
    )
    pairs = len({*words})
    fitted = index.train(config=QUICK, force=True)
    assert (fitted.kept, fitted.left_out) == (True, 0)
    assert len([*index.choices()]) == fitted.pairs >= pairs
    for handle in (index, Index.open(tmp_path / "i")):
        [why, *_] = handle.explain("150", words[50]).raised_by
        assert (why.text, round(why.cosine, 2)) == (words[50], 1)


def test_an_index_of_a_trained_model_is_not_trained_on(trained, tmp_path):
    pool = trained.data / "cand_pool" / "global" / "mbeir_union_val_cand_pool.jsonl"
    index = Index.create(tmp_path / "i", pool, model=trained.model)
    with pytest.raises(UsageError, match="trained model"):
        index.train(trained.data)


@pytest.mark.parametrize(
    "arguments",
    [["fit"], ["fit", ".", "--out", "m"], ["fit", "--index", "i", "--encoder", "small"]],
)
def test_the_command_trains_a_model_or_an_index(arguments, capsys):
    assert main(arguments) == 2
    assert "--index" in capsys.readouterr().err
