#!/usr/bin/env bash
# The whole method on the embedded catalogue: what `make demo` runs, as separate stages.
# Usage: recipes/demo.sh [OUT]
set -euo pipefail
out=${1:-demo-by-hand}

genius data catalogue --items 10400 --train-products 4000 --queries-per-task 200 --out "$out/catalogue"
genius data check "$out/catalogue" --skip-images
genius train encoder "$out/catalogue" --out "$out/model"
genius train quantizer "$out/catalogue" --out "$out/model"
genius train generator "$out/catalogue" --out "$out/model"
genius doctor "$out/model" --data "$out/catalogue"
genius evaluate "$out/catalogue" --model "$out/model" --pools local,global
genius index create "$out/catalogue.index" --model "$out/model" \
  --pool "$out/catalogue/cand_pool/global/mbeir_union_test_cand_pool.jsonl"
genius search "$out/catalogue.index" "a striped green umbrella" --modality image -k 5
