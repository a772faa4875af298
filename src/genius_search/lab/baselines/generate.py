"""Search as the authors' released code does it: Hugging Face's ``generate`` with a prefix callback.

Written afresh from the specification, section 5, and as fast as that way allows: the trie is a plain
dictionary of dictionaries, and the callback caches the widest nodes. Same weights, same ranking as the
package's own search with ``scores="vocabulary"``.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import transformers
from jaxtyping import Float, Float32, Int64, Integer
from torch import Tensor, nn
from torch.nn import functional as F

from genius_search.errors import UsageError
from genius_search.nn.folded import MAX_DISTANCE, NUM_BUCKETS
from genius_search.nn.generator import Generator

Node = dict[int, Any]
"""Next code → node; the last code of an ID leads to an empty one."""


class PointerTrie:
    """All IDs of a pool, reached code by code.

    Parameters
    ----------
    ids
        In any order; sorted ones are quickest.
    offsets
        Added to the codes of each level, which makes them tokens of one vocabulary.
    """

    def __init__(self, ids: Integer[np.ndarray, "ids levels"], offsets: Sequence[int] | None = None) -> None:
        tokens = ids.astype(np.int64) + (0 if offsets is None else np.asarray(offsets))
        self._root: Node = {}
        was_enabled = gc.isenabled()
        gc.disable()  # it would look through millions of dictionaries again and again
        try:
            self._num_ids = self._fill(tokens)
        finally:
            if was_enabled:
                gc.enable()

    def _fill(self, tokens: Int64[np.ndarray, "ids levels"]) -> int:
        """Insert all rows, and return how many were new."""
        num_rows, num_levels = tokens.shape
        # The level at which a row first differs from the one before; num_levels if they are equal.
        differs = np.ones((num_rows, num_levels + 1), dtype=bool)
        differs[1:, :num_levels] = tokens[1:] != tokens[:-1]
        shared = list(range(int(tokens.max(initial=-1)) + 1))  # one object for all that are equal
        leaf: Node = {}  # never written to, so one is enough
        path = [self._root] * num_levels  # the nodes along the row before
        num_ids = 0
        for row, first in zip(tokens.tolist(), differs.argmax(axis=1).tolist(), strict=True):
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

    def __len__(self) -> int:
        return self._num_ids

    def children(self, prefix: Iterable[int]) -> list[int]:
        """Return the codes that continue a prefix; none if it does not exist or is a complete ID."""
        node = self._root
        for code in prefix:
            below = node.get(code)
            if below is None:
                return []
            node = below
        return list(node)

    def num_bytes(self) -> int:
        """Return the memory of the dictionaries as Python counts it; the process grows by some 8% more."""
        total = 0
        waiting = [self._root]
        while waiting:
            node = waiting.pop()
            if node:
                total += sys.getsizeof(node)
                waiting.extend(node.values())
        return total


NOTHING: Final = -1
"""Codes of a place that no ID fills, when a pool has fewer IDs than the beam is wide."""
IMPOSSIBLE: Final = -1e8
"""``generate`` marks duplicates with scores around −1e9."""
CACHED_LENGTH: Final = 2
"""Continuations of prefixes of up to so many tokens, with the start token, are cached: few, and wide."""
T5_NAMES: Final = {
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
    """Sums of log-probabilities over the whole vocabulary, as in a search with ``scores="vocabulary"``."""


class HfGenerate:
    """A generator's weights in a Hugging Face T5, and the trie of a pool."""

    def __init__(self, generator: Generator, ids: Integer[np.ndarray, "ids columns"]) -> None:
        self._generator = generator
        self._offsets = np.array(generator.offsets)
        self._t5 = _make_t5(generator)
        self.trie = PointerTrie(ids[:, : len(generator.sizes)], generator.offsets)
        self._cache: dict[tuple[int, ...], Tensor] = {}

    def search(self, queries: Float[Tensor, "queries dim"], *, beam: int) -> Generated:
        """Return the ``beam`` most probable IDs for each query; fewer when fewer exist."""
        output = self._generate(queries, beam, keep_scores=True)
        tokens = output.sequences[:, 1:]
        if beam > 1:
            scores = output.sequences_scores
        else:  # it decodes greedily and sums nothing
            log_probabilities = F.log_softmax(torch.stack(output.logits, dim=1).float(), dim=-1)
            scores = log_probabilities.gather(2, tokens[..., None])[..., 0].sum(dim=1)
        summed = scores.float().cpu().numpy().reshape(-1, beam)
        is_filled = summed > IMPOSSIBLE
        codes = np.where(is_filled[..., None], self._codes(tokens, beam), NOTHING)
        return Generated(codes, np.where(is_filled, summed, np.float32(-np.inf)))

    def codes(
        self, queries: Float[Tensor, "queries dim"], *, beam: int
    ) -> Int64[np.ndarray, "queries beams levels"]:
        """Return the same IDs without scores, which cost ``generate`` a copy of every step's vocabulary.

        A timing should call this. If fewer IDs exist than the beam is wide, ``generate`` fills the last
        places with anything.
        """
        return self._codes(self._generate(queries, beam, keep_scores=False).sequences[:, 1:], beam)

    @torch.no_grad()
    def _generate(self, queries: Tensor, beam: int, *, keep_scores: bool) -> Any:
        generator = self._generator
        shape = (generator.config.prefixes, generator.config.width)
        projected = generator.prefix_projection(queries.to(self._t5.device)).unflatten(-1, shape)
        return self._t5.generate(
            encoder_outputs=transformers.modeling_outputs.BaseModelOutput(
                last_hidden_state=generator.prefix_norm(projected)
            ),
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

    def _allowed(self, _: int, tokens: Int64[Tensor, " tokens"]) -> Int64[Tensor, " allowed"]:
        """Return the tokens that continue a beam, which begins with the start token."""
        written = tuple(tokens.tolist())
        found = self._cache.get(written)
        if found is None:
            found = torch.tensor(self.trie.children(written[1:]), dtype=torch.int64)
            if len(written) <= CACHED_LENGTH:
                self._cache[written] = found
        return found


def _make_t5(generator: Generator) -> Any:
    """Return Hugging Face's model with our decoder's weights; the prefixes stand in for its encoder."""
    if generator.guide is not None:
        raise UsageError(
            "this generator is guided by geometry (--generator.guide), which Hugging Face's T5 has no place "
            "for; compare with a model that was trained without"
        )
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
                part = next(part for part in T5_NAMES if name.startswith(part))
                theirs.get_parameter(name.replace(part, T5_NAMES[part])).copy_(weight)
    return model.to(generator.embedding.weight.device)
