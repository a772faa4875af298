from __future__ import annotations

import numpy as np
import pytest
import torch

from genius_search.config import GeneratorConfig, SearchConfig
from genius_search.errors import ArtifactMismatch, ArtifactMissing, MissingExtra, UsageError
from genius_search.lab.onnx.export import write_decoder
from genius_search.lab.onnx.run import KIND, OnnxDecoder, Session
from genius_search.nn.generator import Generator
from genius_search.search.beam import search
from genius_search.search.decoder import T5Decoder
from genius_search.search.table import IdTable, SearchSegment
from genius_search.writing import ArtifactWriter

SIZES = (3, 12, 9, 20)
DIM = 24


def make_generator(**changes: object) -> Generator:
    torch.manual_seed(0)
    config = {"layers": 2, "width": 32, "feedforward": 48, "heads": 2, "head_width": 20, "prefixes": 5}
    generator = Generator(DIM, SIZES, GeneratorConfig(**{**config, **changes})).eval()
    with torch.no_grad():
        for name, weight in generator.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
    return generator


@pytest.fixture(scope="module", params=["tied", "per-level"])
def both(request, tmp_path_factory) -> tuple[Generator, OnnxDecoder]:
    generator = make_generator(head=request.param)
    folder = tmp_path_factory.mktemp("decoder")
    return generator, OnnxDecoder(folder, write_decoder(generator, folder))


def drawn(num_queries: int, *, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    queries = torch.randn(num_queries, DIM, generator=random)
    codes = [torch.randint(size, (num_queries,), generator=random) for size in SIZES]
    return queries, torch.stack(codes, dim=1)


@pytest.mark.parametrize("cuts", [(0, 1, 2, 3), (0, 3), (1, 3), (2, 3), (3,)])
def test_codes_read_one_by_one_or_together_say_what_teacher_forcing_says(both, cuts):
    generator, decoder = both
    queries, codes = drawn(3)
    state, said, begin = decoder.start(queries), [], 0
    for end in cuts:
        step = decoder.advance(state, codes[:, begin:end])
        state, begin = step.state, end
        said.append(step.hidden)
    assert state.level == len(SIZES)
    with torch.no_grad():
        expected = generator(queries, codes)
    torch.testing.assert_close(torch.cat(said, dim=1), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("scores", ["level", "vocabulary"])
@pytest.mark.parametrize("level", range(len(SIZES)))
def test_log_probabilities_are_those_of_the_generator(both, level, scores):
    generator, decoder = both
    queries, codes = drawn(2)
    hidden = decoder.advance(decoder.start(queries), codes[:, :3]).hidden[:, level]
    with torch.no_grad():
        expected = generator.log_probabilities(generator(queries, codes)[:, level], level, scores)
    found = decoder.log_probabilities(hidden, level, scores)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert decoder.logits(hidden, level).shape == (2, SIZES[level])


def test_chosen_queries_and_beams_go_on_as_if_they_were_alone(both):
    _, decoder = both
    queries, _ = drawn(3)
    first = decoder.advance(decoder.start(queries), torch.zeros(3, 0, dtype=torch.int64)).state
    wide = first.select(None, torch.tensor([[0, 0], [1, 1], [2, 2]]))
    second = decoder.advance(wide, torch.tensor([[0], [1], [2], [0], [1], [2]])).state
    kept = second.select(torch.tensor([2, 0]), torch.tensor([[5, 4, 5], [0, 0, 1]]))
    again = kept.select(None, torch.tensor([[1, 0], [4, 5]]))  # a choice of a choice
    found = decoder.advance(again, torch.tensor([[7, 3], [8, 4], [9, 5], [10, 6]])).hidden
    rows = [(2, [1, 7, 3]), (2, [2, 8, 4]), (0, [0, 9, 5]), (0, [1, 10, 6])]
    alone = [
        decoder.advance(decoder.start(queries[query : query + 1]), torch.tensor([codes])).hidden[0, 2:]
        for query, codes in rows
    ]
    torch.testing.assert_close(found, torch.stack(alone), atol=1e-5, rtol=1e-5)


def test_beam_search_finds_with_it_what_it_finds_with_pytorch(both):
    generator, decoder = both
    random = np.random.default_rng(3)
    codes = np.stack([random.integers(0, size, 400) for size in SIZES], axis=1)
    table = IdTable.build(codes, np.zeros(400, dtype=np.float32))
    queries, _ = drawn(5)
    expected = search(T5Decoder(generator), [SearchSegment(table)], queries, SearchConfig(beam=10))
    found = search(decoder, [SearchSegment(table)], queries, SearchConfig(beam=10))
    np.testing.assert_array_equal(found.low, expected.low)
    np.testing.assert_allclose(found.scores(), expected.scores(), atol=1e-4)


def test_more_codes_than_an_id_has_are_refused(both):
    _, decoder = both
    queries, codes = drawn(2)
    with pytest.raises(UsageError, match="4 levels"):
        decoder.advance(decoder.start(queries), torch.cat([codes, codes], dim=1))


def test_a_folder_that_is_no_exported_model_is_refused_by_what_it_is(tmp_path):
    with pytest.raises(ArtifactMissing, match="does not exist"):
        OnnxDecoder.open(tmp_path / "nowhere")
    ArtifactWriter(tmp_path / "other", kind="features", config={}, inputs={}).finish()
    with pytest.raises(ArtifactMismatch, match="features"):
        OnnxDecoder.open(tmp_path / "other")


def test_a_precision_that_was_not_exported_is_named_with_the_flag_that_writes_it(tmp_path):
    writer = ArtifactWriter(tmp_path / "model.onnx", kind=KIND, config={}, inputs={})
    (writer.path / "fp32").mkdir()
    writer.finish()
    for folder in (tmp_path / "model.onnx", str(tmp_path / "model.onnx")):
        with pytest.raises(ArtifactMissing, match="--int8"):
            OnnxDecoder.open(folder, precision="int8")


def test_without_onnx_runtime_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(MissingExtra, match=r"genius-search\[onnx\]"):
        Session(tmp_path / "any.onnx")


def test_a_generator_whose_levels_share_an_alphabet_is_not_exported(tmp_path):
    generator = Generator(DIM, (8, 8), GeneratorConfig(layers=1, width=16, heads=2), shares_codes=True)
    with pytest.raises(UsageError, match="Generator"):
        write_decoder(generator, tmp_path)
