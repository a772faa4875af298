"""How well do queries in other languages find English texts? `python benchmarks/languages.py DATA`

DATA is a data set of captions in M-BEIR's layout. `languages.tsv` has 100 of its queries, translated
for this measurement into German, French and Spanish.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import time
from pathlib import Path

import numpy as np

from genius_search.encoders.open import load_encoder


def read_lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def first_ranks(queries, texts, is_answer):
    """Return the rank of the first right answer of each query, from 0."""
    order = np.argsort(-(queries @ texts.T), axis=1)
    return np.take_along_axis(is_answer, order, axis=1).argmax(axis=1)


def encode(encoder, texts):
    start = time.process_time()
    vectors = np.asarray(encoder.text_features(texts))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True) + 1e-9
    return vectors, (time.process_time() - start) / len(texts) * 1000


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--encoder", default="text:universal-sentence-encoder")
    parser.add_argument("--pool", type=int, default=4000)
    arguments = parser.parse_args()
    with (Path(__file__).parent / "languages.tsv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    [query_file] = (arguments.data / "query" / "test").glob("*.jsonl")
    [pool_file] = (arguments.data / "cand_pool" / "local").glob("*.jsonl")
    queries = {query["qid"]: query for query in read_lines(query_file)}
    answers = [set(queries[row["query"]]["pos_cand_list"]) for row in rows]
    pool = {candidate["did"]: candidate["txt"] for candidate in read_lines(pool_file)}
    ids = sorted(set().union(*answers))
    others = sorted(pool.keys() - set(ids))
    random.Random(0).shuffle(others)
    ids += others[: arguments.pool - len(ids)]
    is_answer = np.array([[item_id in ids_of_query for item_id in ids] for ids_of_query in answers])
    encoder = load_encoder(arguments.encoder)
    texts, text_time = encode(encoder, [pool[item_id] for item_id in ids])
    print(f"{arguments.encoder}: {len(ids):,} texts, {text_time:.2f} CPU-ms a text")
    english = [queries[row["query"]]["query_txt"] for row in rows]
    by_language = {"English": english}
    for language in ("German", "French", "Spanish"):
        by_language[language] = [row[language] for row in rows]
    for language, sentences in by_language.items():
        ranks = first_ranks(encode(encoder, sentences)[0], texts, is_answer)
        print(f"{language}: R@1 {(ranks < 1).mean():.2f}, R@5 {(ranks < 5).mean():.2f}")


if __name__ == "__main__":
    main()
