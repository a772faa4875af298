#!/usr/bin/env bash
# The preset `small` with three seeds on Flickr8k's captions and on the catalogue of `make demo` (whose encoder is used
# again), and what each finds: docs/lab/results/seeds.md.
# Usage: recipes/seeds.sh FLICKR8K [DEMO] [OUT]
set -euo pipefail
flickr8k=$1
demo=${2:-demo}
out=${3:-seeds}

for seed in 0 1 2; do
  genius fit "$flickr8k" --encoder "precomputed:$flickr8k/features/text_features.npy" --seed "$seed" --out "$out/flickr8k-$seed"
  genius evaluate "$flickr8k" --model "$out/flickr8k-$seed" --pools global --beam 50 --candidates 1500 \
    --out "$out/flickr8k-$seed.evaluation"
  genius refit "$out/flickr8k-$seed" --pool "$flickr8k/cand_pool/global/mbeir_union_test_cand_pool.jsonl" \
    --out "$out/flickr8k-$seed-refitted"
  genius evaluate "$flickr8k" --model "$out/flickr8k-$seed-refitted" --pools global --beam 50 --candidates 1500 \
    --out "$out/flickr8k-$seed-refitted.evaluation"

  genius fit "$demo/catalogue" --encoder "small:$demo/model/encoder" --seed "$seed" \
    --out "$out/catalogue-$seed"
  genius evaluate "$demo/catalogue" --model "$out/catalogue-$seed" --pools global --beam 50 --candidates 500 \
    --out "$out/catalogue-$seed.evaluation"
done
genius report --out "$out/flickr8k.report" \
  "small=$out/flickr8k-0.evaluation,$out/flickr8k-1.evaluation,$out/flickr8k-2.evaluation" \
  "refitted=$out/flickr8k-0-refitted.evaluation,$out/flickr8k-1-refitted.evaluation,$out/flickr8k-2-refitted.evaluation"
genius report --out "$out/catalogue.report" \
  "small=$out/catalogue-0.evaluation,$out/catalogue-1.evaluation,$out/catalogue-2.evaluation"
