from __future__ import annotations

import numpy as np
import torch


def split(random: np.random.Generator, codes: np.ndarray, count: int) -> list[np.ndarray]:
    """The items in so many parts, in any proportion, some of them empty."""
    owner = random.integers(0, random.integers(1, count + 1), len(codes))
    return [codes[owner == segment] for segment in range(count)]


def test_without_rounding_segments_and_the_merged_table_agree_to_the_letter(plain):
    for seed in range(plain.SOME_POOLS):
        random = np.random.default_rng(seed)
        sizes = plain.sizes_of(seed % plain.NUM_MODELS)
        merged = plain.Pool.of([np.stack([random.integers(0, size, 60) for size in sizes], axis=1)])
        segments = plain.Pool.of(split(random, merged.codes[0], int(random.integers(1, 5))))
        decoder = plain.ExactDecoder(sizes, seed, impossible=0.1)
        queries = torch.arange(6.0)[:, None].repeat(1, plain.DIM)
        config = plain.SearchConfig(beam=int(random.integers(1, 20)))
        whole = plain.search(decoder, merged.segments, queries, config)
        split_up = plain.search(decoder, segments.segments, queries, config)
        for query in range(len(queries)):
            assert segments.found(split_up, query) == merged.found(whole, query), (seed, query)
