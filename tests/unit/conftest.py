"""Features and pairs of a small invented world."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import sentencepiece
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from genius_search.data.features import ABSENT, ROW, Features, Pairs, Shard, to_float16, write_shard
from genius_search.records import Modality, Query, candidate_number, query_number
from genius_search.writing import ArtifactWriter

DIM = 16


class World(NamedTuple):
    """Training data of both stages."""

    lines: list[Query]
    queries: Features
    candidates: Features

    def pairs(self) -> Pairs:
        return Pairs(self.lines, self.queries, self.candidates)


@pytest.fixture(scope="session")
def make_features(tmp_path_factory):
    """Write features into a fresh folder and open them; a row of None has no such modality."""
    numbers = itertools.count()

    def make(ids, image, text, *, modality=None, wanted=None, shard_rows=1000, dim=DIM):
        folder = tmp_path_factory.mktemp("features") / str(next(numbers))
        writer = ArtifactWriter(
            folder, kind="features", config={"columns": ROW.names}, inputs={"made": str(folder)}
        )
        size = len(ids)
        if modality is None:
            modality = [
                Modality.of(has_image=i is not None, has_text=t is not None).code
                for i, t in zip(image, text, strict=True)
            ]
        for number, start in enumerate(range(0, size, shard_rows)):
            rows = slice(start, min(size, start + shard_rows))
            columns = (
                ids[rows],
                _row_numbers(image[rows]),
                _row_numbers(text[rows]),
                modality[rows],
                (wanted or [ABSENT] * size)[rows],
                ids[rows],
            )
            shard = Shard(
                np.array(list(zip(*columns, strict=True)), ROW),
                to_float16(_packed(image[rows], dim)),
                to_float16(_packed(text[rows], dim)),
            )
            write_shard(writer.path, f"shard-{number:06d}", shard)
        writer.finish()
        return Features.open(folder)

    return make


@pytest.fixture(scope="session")
def world(make_features) -> World:
    """Forty things, each as an image, a text and both; texts ask for each of them in two ways."""
    random = np.random.default_rng(7)
    num_things = 40
    things = random.standard_normal((num_things, DIM))
    side = random.standard_normal((2, DIM)) * 0.5
    ids, image, text = [], [], []
    for thing in range(num_things):
        for modality in range(3):
            ids.append(candidate_number(f"1:{3 * thing + modality}"))
            image.append(
                None
                if modality == 1
                else things[thing] + side[0] + 0.1 * random.standard_normal(DIM)
            )
            text.append(
                None
                if modality == 0
                else things[thing] + side[1] + 0.1 * random.standard_normal(DIM)
            )
    candidates = make_features(ids, image, text, shard_rows=50)
    requests = random.standard_normal((3, 2, DIM)) * 2
    lines, query_ids, asked, wanted = [], [], [], []
    for thing, modality in itertools.product(range(num_things), range(3)):
        qid = f"1:{3 * thing + modality}"
        lines.append(Query(qid=qid, modality=Modality.TEXT, text="?", positives=(qid,)))
        for variant in range(2):
            query_ids.append(query_number(qid))
            asked.append(
                things[thing] + requests[modality, variant] + 0.1 * random.standard_normal(DIM)
            )
            wanted.append(modality)
    queries = make_features(query_ids, [None] * len(asked), asked, wanted=wanted, shard_rows=77)
    return World(lines, queries, candidates)


def _row_numbers(rows):
    present = np.array([row is not None for row in rows])
    return np.where(present, np.cumsum(present) - 1, ABSENT).tolist()


def _packed(rows, dim):
    present = [row for row in rows if row is not None]
    return np.array(present, dtype=np.float32) if present else np.zeros((0, dim), dtype=np.float32)


def _write_tokenizer(folder):
    words = ["<pad>", "<unk>", "<s>", "a", "red", "green", "anchor", "on", "ground", "</s>"]
    tokenizer = Tokenizer(
        WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")  # noqa: S106
    )
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 9)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    settings = {**names, "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 16}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


LAYERS = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
TEXTS = {
    **LAYERS,
    "bos_token_id": 2,
    "eos_token_id": 9,
    "pad_token_id": 0,
    "vocab_size": 10,
    "max_position_embeddings": 12,
}


@pytest.fixture(scope="session")
def clip_folder(tmp_path_factory) -> Path:
    """A small CLIP with random weights, in the published layout."""
    from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel  # noqa: PLC0415  slow, and not always needed

    folder = tmp_path_factory.mktemp("clip")
    torch.manual_seed(0)
    config = CLIPConfig(
        text_config={**TEXTS, "hidden_act": "quick_gelu"},
        vision_config={**LAYERS, "image_size": 16, "patch_size": 8, "hidden_act": "quick_gelu"},
        projection_dim=12,
    )
    CLIPModel(config).save_pretrained(folder)
    CLIPImageProcessorPil(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}
    ).save_pretrained(folder)
    _write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def siglip_folder(tmp_path_factory) -> Path:
    """A small SigLIP with random weights, in the published layout."""
    folder = tmp_path_factory.mktemp("siglip")
    _write_siglip(folder)
    _write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def siglip2_folder(tmp_path_factory) -> Path:
    """A small SigLIP with the tokenizer of Gemma: its model of sentencepiece, and the same as tokenizer.json."""
    from transformers import GemmaTokenizer  # noqa: PLC0415  slow, and not always needed

    folder = tmp_path_factory.mktemp("siglip2")
    names = ("pad", "eos", "bos", "unk")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a red anchor", "a green anchor on a red ground"]),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=290,
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        minloglevel=2,
        **{f"{name}_id": number for number, name in enumerate(names)},
        **{f"{name}_piece": f"<{name}>" for name in names},
    )
    GemmaTokenizer.from_pretrained(folder, add_bos_token=False, add_eos_token=True).save_pretrained(
        folder
    )
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"add_eos_token": True, "padding_side": "right"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    _write_siglip(folder, vocab_size=300, eos_token_id=1)
    return folder


def _write_siglip(folder, **texts):
    from transformers import SiglipConfig, SiglipImageProcessorPil, SiglipModel  # noqa: PLC0415  slow, and not always needed

    torch.manual_seed(0)
    config = SiglipConfig(
        text_config={**TEXTS, "projection_size": 16, **texts},
        vision_config={**LAYERS, "image_size": 16, "patch_size": 8},
    )
    SiglipModel(config).save_pretrained(folder)
    SiglipImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(folder)


@pytest.fixture(scope="session")
def sentence_folder(tmp_path_factory) -> Path:
    """A small sentence embedder with random weights, in sentence-transformers' layout without modules."""
    from transformers import BertConfig, BertModel  # noqa: PLC0415  slow, and not always needed

    folder = tmp_path_factory.mktemp("sentences")
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=10, max_position_embeddings=16, **LAYERS)).save_pretrained(
        folder
    )
    _write_tokenizer(folder)
    return folder


class _Killer:
    def __init__(self, steps):
        self.steps = steps

    def begin(self, stage, total):
        pass

    def advance(self, done, measures):
        if done >= self.steps:
            raise KeyboardInterrupt

    def say(self, message):
        pass


@pytest.fixture(scope="session")
def killed_after():
    """A progress that interrupts the stage after so many steps."""
    return _Killer


@pytest.fixture(scope="session")
def read_losses():
    """One measure of every step that a folder's log holds."""

    def read(folder, name="loss"):
        return [
            json.loads(line)[name] for line in (folder / "metrics.jsonl").read_text().splitlines()
        ]

    return read


@pytest.fixture
def disk(monkeypatch):
    """A disk that loses what was not synced: inodes in the order in which they reached it, with renames."""
    events = []
    fsync, rename, replace = os.fsync, Path.rename, Path.replace

    def synced(descriptor):
        events.append(("sync", os.fstat(descriptor).st_ino))
        fsync(descriptor)

    def moved(original):
        def move(path, target):
            events.append(("move", path.stat().st_ino))
            return original(path, target)

        return move

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", moved(rename))
    monkeypatch.setattr(Path, "replace", moved(replace))
    return events


_FILE_OPERATIONS = frozenset(
    {"os.rename", "os.rmdir", "os.mkdir", "os.listdir", "os.scandir", "sqlite3.connect"}
)


def _killed_at(number: int, work: Callable[[], object]) -> bool:
    """Do the work in a process that is killed at its ``number``-th file operation; False if it finishes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child runs no other thread
        child = os.fork()
    if child == 0:
        left = number

        def count(event: str, _: object) -> None:
            nonlocal left
            if event in _FILE_OPERATIONS:
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            torch.set_num_threads(
                1
            )  # it would wait for the parent's threads, which do not exist here
            sys.addaudithook(count)
            work()
        except BaseException:  # noqa: BLE001  the child must not go on as a second pytest
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.waitstatus_to_exitcode(status) == 0
    return False


@pytest.fixture
def killed_at():
    """A function that does work in a process that is killed at a file operation."""
    return _killed_at


class _Part(torch.nn.Module):
    def __init__(self, network, part):
        super().__init__()
        self.network, self.part = network, part

    def forward(self, inputs):
        return getattr(self.network, f"get_{self.part}_features")(inputs).pooler_output


def _export_onnx(folder, target, names):
    """Write the graphs of a checkpoint in the hub's layout."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors"))
    (target / "onnx").mkdir()
    from transformers import AutoModel  # noqa: PLC0415  slow

    network = AutoModel.from_pretrained(folder).requires_grad_(requires_grad=False)
    side = network.config.vision_config.image_size
    tokens = torch.ones(2, network.config.text_config.max_position_embeddings, dtype=torch.int64)
    for file, name, part, given, output in (
        ("text_model", "input_ids", "text", tokens, names[0]),
        ("vision_model", "pixel_values", "image", torch.zeros(2, 3, side, side), names[1]),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                _Part(network, part).eval(),
                (given,),
                target / "onnx" / f"{file}.onnx",
                input_names=[name],
                output_names=[output],
                dynamic_axes={
                    name: {0: "batch", **({1: "tokens"} if file == "text_model" else {})}
                },
                dynamo=False,
            )
    return target


@pytest.fixture(scope="session")
def export_onnx():
    return _export_onnx


@pytest.fixture(autouse=True)
def no_text_recognition(monkeypatch):
    """Commands would read the pictures of every test; those that are about it say so."""
    monkeypatch.setattr("genius_search.data.picture_text.has_rapidocr", lambda: False)
