"""Search as the authors' released code does it: Hugging Face's ``generate`` with a prefix callback.

Written afresh from the specification, section 5, and as fast as that way allows: the trie is a plain
dictionary of dictionaries, and the callback remembers the widest nodes. Same weights, same ranking as our
search with ``scores="vocabulary"``.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64, Integer
from torch import Tensor, nn
from torch.nn import functional as F

from genius_search.errors import UsageError
from genius_search.lab.baselines.dense import imported
from genius_search.nn.generator import MAX_DISTANCE, NUM_BUCKETS, Generator

Node = dict[int, Any]
"""Next code → node; the last code of an ID leads to an empty one."""


class PointerTrie:
    """All IDs of a pool, reached code by code."""

    def __init__(self, root: Node, num_ids: int) -> None:
        self._root = root
        self._num_ids = num_ids

    @staticmethod
    def build(ids: Integer[np.ndarray, "ids levels"], offsets: Sequence[int] | None = None) -> PointerTrie:
        """A trie of these IDs, in any order; sorted ones are quickest.

        Parameters
        ----------
        offsets
            added to the codes of each level, which makes them tokens of one vocabulary.
        """
        num_levels = ids.shape[1]
        tokens = ids.astype(np.int64) + (np.zeros(num_levels, np.int64) if offsets is None else offsets)
        shared = list(range(int(tokens.max(initial=-1)) + 1))  # one object for all that are equal
        root: Node = {}
        with _no_collection():
            num_ids = _fill(root, tokens, shared)
        return PointerTrie(root, num_ids)

    def __len__(self) -> int:
        return self._num_ids

    def children(self, prefix: Iterable[int]) -> list[int]:
        """Codes that continue a prefix; none where it does not exist or is a whole ID."""
        node = self._root
        for code in prefix:
            below = node.get(code)
            if below is None:
                return []
            node = below
        return list(node)

    def num_bytes(self) -> int:
        """Memory of the dictionaries, as Python counts it; the process grows by some 8% more."""
        total = 0
        waiting = [self._root]
        while waiting:
            node = waiting.pop()
            if node:
                total += sys.getsizeof(node)
                waiting.extend(node.values())
        return total

    def bytes_per_id(self) -> float:
        """The same for each ID."""
        return self.num_bytes() / max(1, len(self))


def _fill(root: Node, tokens: np.ndarray, shared: list[int]) -> int:
    """Write all rows under the root; how many were new."""
    num_levels = tokens.shape[1]
    leaf: Node = {}  # never written to, so one is enough
    path = [root] * num_levels  # the nodes along the row before
    num_ids = 0
    for row, first in zip(tokens.tolist(), _first_differences(tokens).tolist(), strict=True):
        if first == num_levels:
            continue
        for level in range(first, num_levels - 1):
            node, token = path[level], row[level]
            below = node.get(token)
            if below is None:
                below = node[shared[token]] = {}
            path[level + 1] = below
        num_ids += row[-1] not in path[-1]
        path[-1][shared[row[-1]]] = leaf
    return num_ids


def _first_differences(tokens: np.ndarray) -> np.ndarray:
    """The level at which each row first differs from the one before; the number of levels where nowhere."""
    num_ids, num_levels = tokens.shape
    differs = np.ones((num_ids, num_levels + 1), dtype=bool)
    differs[1:, :num_levels] = tokens[1:] != tokens[:-1]
    first: np.ndarray = differs.argmax(axis=1)
    return first


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without the garbage collector, which would look through millions of dictionaries again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


NOTHING: Final = -1
"""Codes of a place that no ID fills, when a pool has fewer IDs than the beam is wide."""
IMPOSSIBLE: Final = -1e8
"""``generate`` marks duplicates with scores around −1e9."""
REMEMBERED: Final = 2
"""Prefixes of up to so many tokens (the start token is one) keep their answers: they are few, and wide."""
BLOCK: Final = {
    "self_attention.": "layer.0.SelfAttention.",
    "self_norm.": "layer.0.layer_norm.",
    "cross_attention.": "layer.1.EncDecAttention.",
    "cross_norm.": "layer.1.layer_norm.",
    "wi.": "layer.2.DenseReluDense.wi.",
    "wo.": "layer.2.DenseReluDense.wo.",
    "feedforward_norm.": "layer.2.layer_norm.",
}
"""Parts of a decoder block: our name → T5's."""


class Generated(NamedTuple):
    """The best IDs of each query, best first."""

    codes: Int64[np.ndarray, "queries beams levels"]
    """−1 in places that no ID fills."""
    scores: Float32[np.ndarray, "queries beams"]
    """Sums of log-probabilities over the whole vocabulary, as our search's ``scores="vocabulary"``."""


class HfGenerate:
    """A generator's weights in a Hugging Face T5, and the trie of a pool.

    Raises
    ------
    MissingExtra
        transformers is not installed.
    """

    def __init__(self, generator: Generator, ids: Integer[np.ndarray, "ids columns"]) -> None:
        self._generator = generator
        self._offsets = np.array(generator.offsets)
        self._t5 = _t5(generator)
        self.trie = PointerTrie.build(ids[:, : len(generator.sizes)], generator.offsets)
        self._wide: dict[tuple[int, ...], Tensor] = {}

    def search(self, queries: Float[Tensor, "queries dim"], *, beam: int) -> Generated:
        """The ``beam`` most probable IDs for each query; fewer when fewer exist."""
        output = self._generate(queries, beam, keep_scores=True)
        tokens = output.sequences[:, 1:]
        # With one beam it decodes greedily and sums nothing.
        scores = output.sequences_scores if beam > 1 else _greedy_scores(output.logits, tokens)
        summed = scores.float().cpu().numpy().reshape(-1, beam)
        is_filled = summed > IMPOSSIBLE
        codes = np.where(is_filled[..., None], self._codes(tokens, beam), NOTHING)
        return Generated(codes, np.where(is_filled, summed, np.float32(-np.inf)))

    def codes(
        self, queries: Float[Tensor, "queries dim"], *, beam: int
    ) -> Int64[np.ndarray, "queries beams levels"]:
        """The same IDs without their scores, which cost ``generate`` a copy of every step's whole vocabulary.

        This is what a timing should call. Where fewer IDs exist than the beam is wide, ``generate`` fills the
        last places with anything.
        """
        return self._codes(self._generate(queries, beam, keep_scores=False).sequences[:, 1:], beam)

    @torch.no_grad()
    def _generate(self, queries: Tensor, beam: int, *, keep_scores: bool) -> Any:
        transformers = imported("transformers")
        prefixes = self._prefixes(queries.to(self._t5.device))
        return self._t5.generate(
            encoder_outputs=transformers.modeling_outputs.BaseModelOutput(last_hidden_state=prefixes),
            generation_config=transformers.GenerationConfig(
                num_beams=beam,
                num_return_sequences=beam,
                max_new_tokens=len(self._offsets),
                do_sample=False,
                length_penalty=0.0 if beam > 1 else None,
                pad_token_id=0,
                eos_token_id=None,
                decoder_start_token_id=0,
                return_dict_in_generate=True,
                output_scores=keep_scores and beam > 1,
                output_logits=keep_scores and beam == 1,
            ),
            prefix_allowed_tokens_fn=self._allowed,
        )

    def _codes(self, tokens: Tensor, beam: int) -> Int64[np.ndarray, "queries beams levels"]:
        codes: np.ndarray = tokens.cpu().numpy() - self._offsets
        return codes.reshape(-1, beam, len(self._offsets))

    def _prefixes(self, queries: Tensor) -> Float[Tensor, "queries prefixes width"]:
        generator = self._generator
        shape = (generator.config.prefixes, generator.config.width)
        vectors: Tensor = generator.prefix_norm(generator.prefix_projection(queries).unflatten(-1, shape))
        return vectors

    def _allowed(self, _: int, tokens: Int64[Tensor, " tokens"]) -> Int64[Tensor, " allowed"]:
        """The callback: tokens that continue one beam, which begins with the start token."""
        written = tuple(tokens.tolist())
        found = self._wide.get(written)
        if found is None:
            found = torch.tensor(self.trie.children(written[1:]), dtype=torch.int64)
            if len(written) <= REMEMBERED:
                self._wide[written] = found
        return found


def _greedy_scores(logits: tuple[Tensor, ...], tokens: Tensor) -> Float[Tensor, " queries"]:
    log_probabilities = F.log_softmax(torch.stack(logits, dim=1).float(), dim=-1)
    return log_probabilities.gather(2, tokens[..., None])[..., 0].sum(dim=1)


def _t5(generator: Generator) -> Any:
    """Hugging Face's model with our decoder's weights; the prefixes stand in for its encoder."""
    if generator.guide is not None:
        raise UsageError(
            "this generator is guided by geometry (--generator.guide), which Hugging Face's T5 has no place "
            "for; compare with a model that was trained without"
        )
    transformers = imported("transformers")
    config = generator.config
    is_tied = generator.head is None
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=generator.embedding.num_embeddings,
            d_model=config.width,
            d_kv=config.head_width,
            d_ff=config.feedforward,
            # Also how many layers the cache of keys and values has, so it must be the decoder's.
            num_layers=config.layers,
            num_heads=config.heads,
            relative_attention_num_buckets=NUM_BUCKETS,
            relative_attention_max_distance=MAX_DISTANCE,
            dropout_rate=0.0,
            tie_word_embeddings=is_tied,  # T5 scales what goes into a tied head, and only that
            pad_token_id=0,
            eos_token_id=None,
            decoder_start_token_id=0,
        )
    ).eval()
    model.encoder.block = nn.ModuleList()
    with torch.no_grad():
        model.shared.weight.copy_(generator.embedding.weight)
        if generator.head is not None:
            model.lm_head.weight = nn.Parameter(generator.head.weight.detach().clone())
        first = model.decoder.block[0].layer[0].SelfAttention
        first.relative_attention_bias.weight.copy_(generator.position_bias.weight)
        model.decoder.final_layer_norm.weight.copy_(generator.final_norm.weight)
        for ours, theirs in zip(generator.blocks, model.decoder.block, strict=True):
            for name, weight in ours.named_parameters():
                part = next(part for part in BLOCK if name.startswith(part))
                theirs.get_parameter(name.replace(part, BLOCK[part])).copy_(weight)
    return model.to(generator.embedding.weight.device)
