#!/usr/bin/env bash
# The paper's tables and figures on any data set: every row of recipes/paper.toml, then the report. Stopped and
# started again it goes on. Further flags are those of `genius sweep`; with --quick it takes minutes, to see that it works.
#   recipes/paper.sh demo/catalogue paper --encoder-of demo/model         the catalogue of `make demo`
#   recipes/paper.sh icons paper-icons --encoder-of icons-model           after recipes/icons.sh icons icons-model
#   recipes/paper.sh flickr8k paper-flickr8k --encoder precomputed:flickr8k/features/text_features.npy \
#     --skip clip-sf,clip-ff,blip-sf,blip-ff,level0-none,level0-assigned,level0-classifier,scale       texts alone
# Usage: recipes/paper.sh DATA OUT (--encoder SPEC | --encoder-of MODEL) [--quick] [FLAG ...]
set -euo pipefail
data=${1:?folder of the data set, in the layout of M-BEIR}
out=${2:?folder to write}

genius sweep "$(dirname "$0")/paper.toml" --data "$data" --out "$out/rows" "${@:3}" ||
  echo "some rows failed: the report says which" >&2
genius report "$out/rows" --data "$data" --out "$out/report"
