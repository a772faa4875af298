"""Training of an ID scheme, between the quantizer and the generator: ``genius fit --ids NAME``."""

from __future__ import annotations

from pathlib import Path

from genius_search.artifact import ArtifactWriter
from genius_search.config import TrainingConfig, to_json
from genius_search.data.mbeir import read_pool
from genius_search.data.pairs import Pairs
from genius_search.nn.ids import (
    KIND,
    RESIDUAL,
    SCHEMES,
    Candidates,
    TrainedIds,
    TrainingSet,
    load_ids,
    residual_ids,
    write_ids,
)
from genius_search.nn.quantizer import TrainedQuantizer, encode, fuse
from genius_search.progress import Progress
from genius_search.records import candidate_number
from genius_search.registry import find_part
from genius_search.training.embed import TrainingRecords


def train_ids(
    name: str,
    records: TrainingRecords,
    pairs: Pairs,
    quantizer: TrainedQuantizer,
    folder: Path,
    training: TrainingConfig,
    *,
    progress: Progress,
) -> TrainedIds:
    """Train a scheme by its name, or open the folder if this was done already.

    Raises
    ------
    UsageError
        there is no such scheme.
    """
    scheme = find_part("id_schemes", name, SCHEMES)
    if name == RESIDUAL:
        return residual_ids(quantizer.quantizer)
    writer = ArtifactWriter(
        folder,
        kind=KIND,
        config={"scheme": name, "training": to_json(training)},
        inputs={**pairs.fingerprints, "quantizer": quantizer.manifest.fingerprint},
    )
    if writer.finished() is not None:
        return load_ids(folder, quantizer.quantizer)
    candidates = pairs.candidates
    encoded = encode(quantizer.quantizer, candidates)
    pool = read_pool(records.data.training_pools())
    texts = {candidate_number(candidate.did): candidate.text for candidate in pool}
    data = TrainingSet(
        candidates=Candidates(
            encoded.embeddings,
            encoded.codes.numpy(),
            candidates.ids,
            [texts[number] for number in candidates.ids.tolist()],
        ),
        queries=fuse(quantizer.quantizer, pairs.queries),
        query_numbers=pairs.queries.ids,
        query_texts=records.texts(),
        pairs=pairs,
        quantizer=quantizer.quantizer,
        training=training,
        folder=writer.path,
        progress=progress,
    )
    return write_ids(writer, name, scheme.fit(data))
