"""Levels that share their codes, as the digits of a number do."""

import pytest
import torch

from genius_search.config import GeneratorConfig
from genius_search.nn.folded import NUM_SPECIAL
from genius_search.nn.generator import Generator
from genius_search.search.decoder import T5Decoder

CONFIG = GeneratorConfig(
    layers=2, width=16, feedforward=32, heads=2, head_width=8, prefixes=3, dropout=0.0, softmax="level"
)


@pytest.mark.parametrize("head", ["tied", "per-level"])
def test_search_reads_one_alphabet_at_every_level_as_training_does(head):
    torch.manual_seed(0)
    config = GeneratorConfig(**{**CONFIG.__dict__, "head": head})
    generator = Generator(6, (11, 11, 11), config, shares_codes=True).eval()
    assert len(generator.embedding.weight) == NUM_SPECIAL + 11
    queries, codes = torch.randn(4, 6), torch.randint(11, (4, 3))
    trained = generator(queries, codes)
    decoder = T5Decoder(generator)
    with torch.no_grad():
        step = decoder.advance(decoder.start(queries), codes[:, :2])
        for level in range(3):
            torch.testing.assert_close(
                decoder.log_probabilities(step.hidden[:, level], level, "level"),
                generator.log_probabilities(trained[:, level], level, "level"),
                rtol=1e-4,
                atol=1e-4,
            )
