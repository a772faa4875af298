#!/usr/bin/env bash
# Real icons, their names and changed icons, in M-BEIR's layout: an encoder, a model, and its table on the global pool.
# Usage: recipes/icons.sh DATA [OUT] [FLAG ...]      needs the extra `words`; further flags are those of `genius fit`
set -euo pipefail
data=$1
out=${2:-icons-model}

genius fit "$data" --encoder small --preset small --out "$out" \
  --encoder.network.dim 256 --encoder.network.shortcuts --encoder.network.dropout 0.3 \
  --encoder.words text:wordllama --encoder.training.epochs 24 "${@:3}"
python -m research.evaluate "$data" --model "$out" --split test --pools global --beam 10 --candidates 2000 \
  --methods exact-raw exact-fused exact-codes routing+codes generative generative+codes generative+embeddings
