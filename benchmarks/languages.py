"""Measure recall of queries in other languages for English texts.

Usage: python benchmarks/languages.py DATA [--encoder ENCODER] [--pool 4000]

DATA is a data set of captions in M-BEIR's layout. `languages.tsv` has 100 of its queries, and their
translations into German, French and Spanish.
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


def read_json_lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def encode(encoder, texts):
    """Return normalised vectors and the CPU-milliseconds of a text."""
    began = time.process_time()
    vectors = np.asarray(encoder.text_features(texts))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True) + 1e-9
    return vectors, (time.process_time() - began) / len(texts) * 1000


def rank_answers(queries, texts, is_answer):
    """Return the rank of the first right answer of each query, from 0."""
    order = np.argsort(-(queries @ texts.T), axis=1)
    return np.take_along_axis(is_answer, order, axis=1).argmax(axis=1)


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
    queries = {query["qid"]: query for query in read_json_lines(query_file)}
    answers = [set(queries[row["query"]]["pos_cand_list"]) for row in rows]
    pool = {candidate["did"]: candidate["txt"] for candidate in read_json_lines(pool_file)}
    ids = sorted(set().union(*answers))
    wrong_ids = sorted(pool.keys() - set(ids))
    random.Random(0).shuffle(wrong_ids)
    ids += wrong_ids[: arguments.pool - len(ids)]
    is_answer = np.array([[item_id in answer_ids for item_id in ids] for answer_ids in answers])
    encoder = load_encoder(arguments.encoder)
    texts, text_time = encode(encoder, [pool[item_id] for item_id in ids])
    print(f"{arguments.encoder}: {len(ids):,} texts, {text_time:.2f} CPU-ms a text")
    by_language = {"English": [queries[row["query"]]["query_txt"] for row in rows]}
    for language in ("German", "French", "Spanish"):
        by_language[language] = [row[language] for row in rows]
    for language, sentences in by_language.items():
        ranks = rank_answers(encode(encoder, sentences)[0], texts, is_answer)
        print(f"{language}: R@1 {(ranks < 1).mean():.2f}, R@5 {(ranks < 5).mean():.2f}")


if __name__ == "__main__":
    main()
