"""IRGen's tokenizer."""

import torch
from torch.nn import functional as F

from research.baselines.ids import RetrievalTokenizer

DIM = 12


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def started(items=300, seed=0):
    torch.manual_seed(seed)
    vectors = F.normalize(torch.randn(items, DIM, generator=seeded(seed)), dim=1)
    tokenizer = RetrievalTokenizer(DIM, levels=3, codes=16)
    tokenizer.start(vectors, generator=seeded(seed))
    return tokenizer, vectors


def test_each_level_takes_the_nearest_of_what_is_left():
    tokenizer, vectors = started()
    codes = tokenizer.encode(vectors)
    left = vectors
    for level, table in enumerate(tokenizer.tables()):
        assert torch.equal(torch.cdist(left, table).argmin(dim=1), codes[:, level])
        left = left - table[codes[:, level]]
    torch.testing.assert_close(tokenizer.prefixes(vectors).sums[-1], vectors - left)


def test_every_prefix_of_the_codes_is_supervised():
    tokenizer, vectors = started()
    none = torch.zeros(20, 20, dtype=torch.bool)
    loss, found = tokenizer.loss(vectors[:20] + 0.1 * vectors[20:40], vectors[:20], none)
    loss.backward()
    assert float(tokenizer.down.weight.grad.norm()) > 0
    sums = found.sums.detach()
    closer = (sums[1:] - vectors[:20]).norm(dim=2).mean(dim=1)
    assert (closer < (sums[:-1] - vectors[:20]).norm(dim=2).mean(dim=1)).all()
