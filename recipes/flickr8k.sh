#!/usr/bin/env bash
# Caption-to-caption retrieval on Flickr8k with precomputed sentence embeddings, in M-BEIR's layout
# (query/, cand_pool/, qrels/, instructions/ and features/text_features.npy, a row for each caption).
# Usage: recipes/flickr8k.sh DATA [OUT]
set -euo pipefail
data=$1
out=${2:-flickr8k-model}

genius fit "$data" --encoder "precomputed:$data/features/text_features.npy" --preset small --out "$out"
python -m research.evaluate "$data" --model "$out" --split test --pools global --beam 50 --candidates 1500
