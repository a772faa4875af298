#!/usr/bin/env bash
# The paper's rows on Flickr8k's captions with precomputed sentence embeddings (recipes/flickr8k.sh says how they lie), as
# recipes/paper.sh makes them on the catalogue, without those that need pictures or several modalities.
# Usage: recipes/paper-flickr8k.sh [--quick] FLICKR8K [OUT]
set -euo pipefail
quick=()
if [ "${1:-}" = --quick ]; then
  quick=(--quick)
  shift
fi
data=$1
out=${2:-paper-flickr8k}

genius sweep "$(dirname "$0")/paper.toml" --data "$data" --encoder "precomputed:$data/features/text_features.npy" \
  --skip clip-sf,clip-ff,blip-sf,blip-ff,level0-none,level0-assigned,level0-classifier,scale --out "$out/rows" --jobs 2 \
  "${quick[@]}" || echo "some rows failed: the report says which" >&2
genius report "$out/rows" --data "$data" --out "$out/report"
