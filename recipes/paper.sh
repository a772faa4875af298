#!/usr/bin/env bash
# The paper's tables and figures on the catalogue of `make demo`, whose encoder and features are used again: every row of
# recipes/paper.toml, two at a time, then the report. Stopped and started again it goes on. With --quick: minutes, to see
# that it works.
# Usage: recipes/paper.sh [--quick] [DEMO] [OUT]
set -euo pipefail
quick=()
if [ "${1:-}" = --quick ]; then
  quick=(--quick)
  shift
fi
demo=${1:-demo}
out=${2:-paper}

genius sweep "$(dirname "$0")/paper.toml" --data "$demo/catalogue" --encoder-of "$demo/model" --out "$out/rows" --jobs 2 \
  "${quick[@]}" || echo "some rows failed: the report says which" >&2
genius report "$out/rows" --data "$demo/catalogue" --out "$out/report"
