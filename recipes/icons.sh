#!/usr/bin/env bash
# Real icons, their names and changed icons, in M-BEIR's layout: an encoder, a model, and its table on the global pool.
# Usage: recipes/icons.sh DATA [OUT]
set -euo pipefail
data=$1
out=${2:-icons-model}

cat > "$out.toml" << 'END'
[encoder.network]
dim = 256
[encoder.training]
epochs = 24
END
genius fit "$data" --encoder small --config "$out.toml" --out "$out"
python -m research.evaluate "$data" --model "$out" --split test --pools global --beam 10 --candidates 2000 \
  --methods exact-raw exact-fused exact-codes routing+codes generative generative+codes generative+embeddings
