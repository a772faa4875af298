"""Indexes that are created with an encoder alone."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest
from huggingface_hub import constants
from PIL import Image

from genius_search.cli import main
from genius_search.cli.encoders import PICTURE_ENCODERS, choose_encoder
from genius_search.encoders import static, universal
from genius_search.encoders.rows import encode_rows
from genius_search.errors import ArtifactMismatch, BadData, UsageError
from genius_search.index import build, source
from genius_search.index import writer as writer_module
from genius_search.index.fit import has_outgrown
from genius_search.index.index import Index
from genius_search.index.pool import NewItem, open_pool
from genius_search.index.writer import write_manifest

WORDS = [
    "a red anchor",
    "a green anchor",
    "anchor on red ground",
    "green ground",
    "red",
    "a ground on a green",
]


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """Pictures, pictures with captions, and texts."""
    folder = tmp_path_factory.mktemp("pool")
    random = np.random.default_rng(0)
    for number in range(12):
        picture = Image.fromarray(random.integers(0, 256, (20, 24, 3), dtype=np.uint8))
        picture.save(folder / f"{number}.png")
    for number, words in enumerate(WORDS):
        (folder / f"{number}.txt").write_text(words)  # captions of the first six pictures
        (folder / f"note {number}.txt").write_text(f"{words} a")
    (folder / "broken.png").write_bytes(b"no picture")
    return folder


@pytest.fixture(scope="module")
def index(pool, clip_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("index") / "i.index"
    return Index.create(folder, pool, encoder=f"clip:{clip_folder}")


def test_items_of_every_kind_are_found_without_training(index, pool):
    info = index.info()
    assert info.by_modality == {"image": 6, "text": 6, "image-text": 6}
    assert info.embeddings == "fused, 8 bits a number"
    assert index.search(image=pool / "9.png")[0].id == "9.png"
    assert index.search("green ground a")[0].id == "note 3.txt"
    assert index.search("green ground", image=pool / "3.png")[0].id == "3.png"
    assert {hit.modality.value for hit in index.search("red", k=18)} == {
        "image",
        "text",
        "image-text",
    }


def test_an_index_moves_with_its_model_and_takes_changes(pool, clip_folder, tmp_path):
    Index.create(tmp_path / "before", pool, encoder=f"clip:{clip_folder}")
    shutil.move(tmp_path / "before", tmp_path / "after")
    index = Index.open(tmp_path / "after")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "new.txt").write_text("red red red")
    assert index.add(tmp_path / "more").added == 1
    assert index.add(pool).unchanged == 18
    assert index.search("red red red")[0].id == "more/new.txt"
    assert index.delete("more/new.txt").deleted == 1
    index.compact(min_deleted=0)
    assert index.check().items == 18
    assert index.explain("note 3.txt", "green ground a").rank == 1


def test_a_damaged_model_inside_an_index_is_found(pool, clip_folder, tmp_path):
    index = Index.create(tmp_path / "i", pool, encoder=f"clip:{clip_folder}")
    weights = tmp_path / "i" / "model" / "quantizer" / "quantizer.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    with pytest.raises(ArtifactMismatch, match=r"quantizer\.safetensors"):
        index.check()


def test_an_interrupted_run_encodes_nothing_twice(pool, clip_folder, tmp_path, monkeypatch):
    class Stop(Exception):
        pass

    def stop(*_, **__):
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(build, "fit_codebooks", stop)
        with pytest.raises(Stop):
            Index.create(tmp_path / "i", pool, encoder=f"clip:{clip_folder}")
    again = []

    def encode(rows, encoder, **options):
        again.extend(row.image.name for _, row in rows)
        return encode_rows(rows, encoder, **options)

    monkeypatch.setattr(source, "encode_rows", encode)
    index = Index.create(tmp_path / "i", pool, encoder=f"clip:{clip_folder}")
    added = index.last_change
    assert added.added == len(index.search("red", k=50)) == 18
    assert again == ["broken.png"]
    assert not (tmp_path / "i" / ".work").exists()


def test_parts_of_a_pool_are_encoded_by_several_runs(pool, clip_folder, tmp_path, monkeypatch):
    arguments = ["index", "create", str(tmp_path / "i"), "--pool", str(pool)]
    arguments += ["--encoder", f"clip:{clip_folder}"]
    encoded = []

    def encode(rows, encoder, **options):
        encoded.extend(row.key.id for _, row in rows)
        return encode_rows(rows, encoder, **options)

    monkeypatch.setattr(source, "encode_rows", encode)
    assert main([*arguments, "--part", "2/2"]) == 0
    second = {*encoded}
    assert main([*arguments, "--part", "1/2"]) == 0
    assert len(encoded) == len({*encoded}) == 19
    assert len(second) == 9
    encoded.clear()
    assert main(arguments) == 0
    assert encoded == ["broken.png"]
    assert len(Index.open(tmp_path / "i").search("red", k=50)) == 18
    assert main([*arguments, "--part", "3/2"]) == 2


def test_texts_alone_need_an_encoder_of_texts_only(pool, sentence_folder, tmp_path):
    lines = "".join(
        f'{{"did": "1:{n}", "modality": "text", "txt": "{words}"}}\n'
        for n, words in enumerate(WORDS)
    )
    (tmp_path / "pool.jsonl").write_text(lines)
    index = Index.create(
        tmp_path / "texts", tmp_path / "pool.jsonl", encoder=f"text:{sentence_folder}"
    )
    assert index.search("green ground")[0].id == "1:3"


def test_every_picture_is_an_item_of_an_encoder_of_texts(pool, sentence_folder, tmp_path):
    index = Index.create(tmp_path / "i", pool, encoder=f"text:{sentence_folder}")
    pictures = [hit for hit in index.search("green ground", k=50) if hit.image]
    modalities = {hit.id: hit.modality for hit in pictures}
    assert [modalities[f"{n}.png"] for n in (3, 7)] == ["image-text", "image"]
    assert pictures[0].id == "3.png"
    assert [entry.file for entry in index.last_change.left_out] == [str(pool / "broken.png")]
    assert {hit.modality for hit in index.search("green", modality="image")} == {"image"}
    assert index.count(modality="image") == 6
    assert index.search("green ground", modality="image-text")[0].id == "3.png"


def test_names_folders_and_months_find_pictures_without_captions(pool, sentence_folder, tmp_path):
    photos = tmp_path / "photos"
    (photos / "rome").mkdir(parents=True)
    names = ("rome/forum_walk.png", "IMG_20190504_120000.png", "IMG_2031.png", "DSC_0007.png")
    for number, name in enumerate(names):
        shutil.copy(pool / f"{number + 6}.png", photos / name)
    index = Index.create(tmp_path / "i", photos, encoder=f"text:{sentence_folder}")
    assert len(index) == 4
    assert index.search("forum")[0].id == index.search("Rome")[0].id == names[0]
    assert index.search("May 2019")[0].id == names[1]
    assert [hit.id for hit in index.search(match="walk")] == [names[0]]
    index.update(names[2], fields={"city": "Naples"})
    assert index.search("naples")[0].id == names[2]
    assert index.sync().unchanged == 4


def test_a_later_encoder_of_pictures_keeps_ids_fields_and_choices(
    pool, sentence_folder, clip_folder, tmp_path, caplog
):
    index = Index.create(tmp_path / "i", pool, encoder=f"text:{sentence_folder}")
    index.update("7.png", fields={"stars": 5})
    index.learn("7.png", "a special query")
    index.learn("9.png", vector=np.ones(index.model.encoder.dim))
    before = {item.id: item for item in index}
    assert index.refit(encoder=f"clip:{clip_folder}") == 1
    assert not caplog.records
    after = {item.id: item for item in index}
    assert after == before
    assert index.model.encoder.spec == f"clip:{clip_folder}"
    assert index.search("a special query", modality="image")[0].id == "7.png"
    assert [choice["chosen"] for choice in index.choices()] == ["7.png"]
    assert index.search(image=pool / "8.png")[0].id == "8.png"
    assert index.check().items == len(before)
    assert index.sync().unchanged == len(before)
    assert Index.open(tmp_path / "i").count("stars=5") == 1


def test_an_encoder_that_cannot_read_a_picture_changes_nothing(
    pool, sentence_folder, clip_folder, tmp_path
):
    folder = shutil.copytree(pool, tmp_path / "pool")
    index = Index.create(tmp_path / "i", folder, encoder=f"text:{sentence_folder}")
    (folder / "7.png").unlink()
    with pytest.raises(BadData, match=r"7\.png: missing.*delete the items"):
        index.refit(encoder=f"clip:{clip_folder}")
    assert index.model.encoder.spec == f"text:{sentence_folder}"


def test_without_a_download_pictures_are_found_by_words_and_three_encoders_are_suggested(
    pool, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    assert main(["index", "create", str(tmp_path / "i"), "--pool", str(pool)]) == 0
    message = capsys.readouterr().err
    assert all(str(encoder) in message for encoder in PICTURE_ENCODERS)
    assert "not by their contents" in message
    monkeypatch.setattr(static, "has_wordllama", lambda: False)
    monkeypatch.setattr(universal, "has_universal", lambda: False)
    assert main(["index", "create", str(tmp_path / "j"), "--pool", str(pool)]) == 5
    message = capsys.readouterr().err
    assert all(str(encoder) in message for encoder in PICTURE_ENCODERS)
    assert "genius-search[words]" in message
    assert not (tmp_path / "j").exists()


def test_on_a_terminal_one_of_three_encoders_of_pictures_is_chosen(pool, monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    opened = open_pool(pool, captions=True)
    for answer, spec in (
        ("3", "onnx-quantized:Xenova/clip-vit-base-patch32"),
        ("1", PICTURE_ENCODERS[0].spec),
        ("", "text:wordllama"),
        ("9", "text:wordllama"),
    ):
        monkeypatch.setattr("builtins.input", lambda _, answer=answer: answer)
        assert choose_encoder(opened, download=False) == (spec, not spec.startswith("text"))


def test_texts_in_other_languages_get_an_encoder_that_reads_them(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.md").write_text("Der Hund spielt mit dem Ball und ist nicht müde.")
    opened = open_pool(tmp_path / "notes", captions=True)
    monkeypatch.setattr(universal, "has_universal", lambda: True)
    expected = ("text:universal-sentence-encoder", False)
    assert choose_encoder(opened, download=False) == expected
    assert choose_encoder(opened, download=True) == expected
    monkeypatch.setattr(universal, "has_universal", lambda: False)
    assert choose_encoder(opened, download=False) == ("text:wordllama", False)
    assert "genius-search[languages]" in capsys.readouterr().err


def test_a_refit_gives_new_ids_in_place_to_handles_that_are_open(pool, clip_folder, tmp_path):
    index = Index.create(tmp_path / "i", pool, encoder=f"clip:{clip_folder}")
    reader = Index.open(tmp_path / "i")
    (tmp_path / "more").mkdir()
    for number in range(20):
        (tmp_path / "more" / f"{number} more.txt").write_text("red " * number + "green")
    assert not has_outgrown(*index._current_state())
    index.add(tmp_path / "more")
    index.delete("note 0.txt")
    assert has_outgrown(*index._current_state())
    index.refit()
    assert not has_outgrown(*index._current_state())
    assert index.check().items == 18 + 20 - 1
    for handle in (index, reader, Index.open(tmp_path / "i")):
        hits = handle.search(
            "green ground a", k=5, config=dataclasses.replace(index.settings, density_weight=0.0)
        )
        assert "note 3.txt" in [hit.id for hit in hits[:3]]
    assert sorted(path.name for path in (tmp_path / "i").glob("model*")) == ["model-5"]
    assert reader.add(tmp_path / "more").unchanged == 20


def test_the_number_of_levels_is_chosen_and_kept_by_refits(pool, clip_folder, tmp_path):
    arguments = ["--pool", str(pool), "--encoder", f"clip:{clip_folder}", "--levels", "20"]
    assert main(["index", "create", str(tmp_path / "i"), *arguments]) == 0
    index = Index.open(tmp_path / "i")
    assert len(index.search("red")[0].codes) == 21
    index.refit()
    assert len(index.search("red")[0].codes) == 21
    assert main(["index", "refit", str(tmp_path / "i"), "--levels", "2"]) == 0
    assert len(index.search("red")[0].codes) == 3


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "either a model, or the encoder"),
        ({"model": "m", "levels": 8}, "trained model"),
        ({"encoder": "clip:e", "levels": 129}, "levels = 129"),
        (
            {"encoder": "clip:e", "embeddings": "raw", "embedding_bits": 4},
            "16 bits per number, not 4",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anything_is_opened(
    pool, tmp_path, settings, said
):
    with pytest.raises(UsageError, match=said):
        Index.create(tmp_path / "i", pool, **settings)
    assert not (tmp_path / "i").exists()


def test_large_indexes_store_two_bits_a_number_and_raw_embeddings_sixteen(
    pool, clip_folder, tmp_path, monkeypatch
):
    encoder = f"clip:{clip_folder}"
    index = Index.create(tmp_path / "raw", pool, encoder=encoder, embeddings="raw")
    assert index.info().embeddings == "raw, 16 bits a number"
    monkeypatch.setattr(build, "FEW_ITEMS", 1)
    monkeypatch.setattr(build, "MANY_ITEMS", 2)
    index = Index.create(tmp_path / "large", pool, encoder=encoder)
    assert index.info().embeddings == "fused, 2 bits a number"
    index.refit()  # reads embeddings by the code vectors before
    vectors = index._snapshot.evidence(index.model.ranker).embeddings[0](np.arange(3))
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=0.2)


def test_a_refit_that_dies_changes_nothing(pool, clip_folder, tmp_path, monkeypatch):
    index = Index.create(tmp_path / "i", pool, encoder=f"clip:{clip_folder}")
    before = index.search("red", k=5)
    with monkeypatch.context() as patch:
        patch.setattr("genius_search.index.writer.write_manifest", None)
        with pytest.raises(TypeError):
            index.refit()
    assert Index.open(tmp_path / "i").search("red", k=5) == before
    index.refit()
    assert index.check().items == 18


def test_only_an_index_with_its_own_model_and_embeddings_is_refitted(
    trained, pool, clip_folder, tmp_path
):
    Index.create(tmp_path / "i", pool, encoder=f"clip:{clip_folder}", embeddings="none")
    with pytest.raises(UsageError, match="embeddings"):
        Index.open(tmp_path / "i").refit()
    foreign = Index.create(tmp_path / "trained", pool, model=trained.model)
    assert not has_outgrown(*foreign._current_state())
    with pytest.raises(UsageError, match="trained model"):
        foreign.refit()


@pytest.mark.parametrize("path", ["/etc/passwd", "../a.png", "x/../../a.png"])
def test_a_pool_names_no_picture_outside_its_folder(tmp_path, path):
    paths = (str(tmp_path / "a.png"), path)
    rows = [
        {"did": f"1:{n}", "modality": "image", "img_path": image} for n, image in enumerate(paths)
    ]
    (tmp_path / "pool.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    items = open_pool(tmp_path / "pool.jsonl", captions=True).items()
    assert next(items).image == str(tmp_path / "a.png")
    with pytest.raises(BadData, match="leads out"):
        next(items)


TEXTS = [NewItem(f"{number}", f"a red kite number {number}") for number in range(60)]


def test_an_index_that_another_process_created_meanwhile_is_left_as_it_is(tmp_path, monkeypatch):
    picture = NewItem("mine", "a kite", np.zeros((9, 9, 3), dtype=np.uint8))
    real = build.require_free_folder

    def check_before(folder):
        real(folder)
        monkeypatch.setattr(build, "require_free_folder", real)
        Index.create(folder, [picture, *TEXTS], encoder="text:wordllama")

    monkeypatch.setattr(build, "require_free_folder", check_before)
    with pytest.raises(UsageError, match="holds an index already"):
        Index.create(tmp_path / "i", TEXTS, encoder="text:wordllama")
    index = Index.open(tmp_path / "i")
    assert "mine" in index
    assert index.check().items == 61


def test_a_creation_that_fails_removes_what_it_made_and_no_more(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("failed")

    monkeypatch.setattr(build, "measure_least_scores", fail)
    (tmp_path / "theirs").mkdir()
    picture = NewItem("mine", "a kite", np.zeros((9, 9, 3), dtype=np.uint8))
    for name in ("ours", "theirs"):
        with pytest.raises(OSError, match="failed"):
            Index.create(tmp_path / name, [picture, *TEXTS], encoder="text:wordllama")
        assert not list((tmp_path / name).glob("pictures/*/*"))
    monkeypatch.undo()
    assert len(Index.create(tmp_path / "ours", TEXTS, encoder="text:wordllama")) == 60


def test_an_index_appears_with_its_least_scores(tmp_path, monkeypatch):
    written = []

    def write(folder, manifest):
        written.append(manifest)
        write_manifest(folder, manifest)

    monkeypatch.setattr(writer_module, "write_manifest", write)
    index = Index.create(tmp_path / "i", TEXTS, encoder="text:wordllama")
    (manifest,) = written
    assert manifest.least
    assert index._snapshot.manifest == manifest


def test_an_index_that_has_lost_its_manifest_is_not_created_again(tmp_path):
    index = Index.create(tmp_path / "i", TEXTS, encoder="text:wordllama")
    index.add([NewItem("mine", "my only copy of this text")])
    (tmp_path / "i" / "index.json").unlink()
    with pytest.raises(UsageError, match=r"whose index\.json is missing"):
        Index.create(tmp_path / "i", TEXTS, encoder="text:wordllama")
