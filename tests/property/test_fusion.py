"""The fusion of a query's features in NumPy is the one in PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from genius_search.config import FusionConfig, QuantizerConfig
from genius_search.nn.codebooks import Codebooks, shapes_of_weights
from genius_search.nn.quantizer import Quantizer


@pytest.mark.parametrize("kind", ["sum", "network"])
@pytest.mark.parametrize("start", ["random", "sum"])
def test_fused_embeddings_are_those_of_the_network(kind, start):
    for seed in range(60):
        random = np.random.default_rng(seed)
        dim, hidden = (int(random.integers(1, 40)) for _ in range(2))
        fusion = FusionConfig(kind=kind, hidden=hidden, start=start, dropout=0.3)
        config = QuantizerConfig(levels=1, codebook_size=4, fusion=fusion)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            quantizer = Quantizer(dim, config).eval()
            for weight in quantizer.fusion.parameters():  # biases that matter, and shares near 0 and 1
                weight.mul_(float(random.choice([1, 1, 8])))
        weights = {name: weight.numpy() for name, weight in quantizer.state_dict().items()}
        assert shapes_of_weights(dim, config).items() <= {n: w.shape for n, w in weights.items()}.items()
        scale = 10.0 ** random.integers(-3, 3)
        image, text = (scale * random.standard_normal((2, 7, dim))).astype(np.float32)
        image[random.random(7) < 0.4] = 0
        text[random.random(7) < 0.4] = 0
        with torch.no_grad():
            expected = quantizer.fusion(torch.from_numpy(image), torch.from_numpy(text))
        fused = Codebooks(dim, config, weights).fuse(image, text)
        assert fused.dtype == np.float32
        np.testing.assert_allclose(fused, expected, atol=1e-5, err_msg=str(seed))
