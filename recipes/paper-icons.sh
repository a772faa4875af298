#!/usr/bin/env bash
# The paper's rows on icons, with the encoder and the features of `recipes/icons.sh DATA MODEL`; else as recipes/paper.sh.
# Usage: recipes/paper-icons.sh [--quick] DATA [MODEL] [OUT]
set -euo pipefail
quick=()
if [ "${1:-}" = --quick ]; then
  quick=(--quick)
  shift
fi
data=$1
model=${2:-icons-model}
out=${3:-paper-icons}

genius sweep "$(dirname "$0")/paper.toml" --data "$data" --encoder-of "$model" --out "$out/rows" --jobs 2 \
  "${quick[@]}" || echo "some rows failed: the report says which" >&2
genius report "$out/rows" --data "$data" --out "$out/report"
