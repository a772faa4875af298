#!/usr/bin/env bash
# The paper's ablations on the catalogue of `make demo`: each row is one flag away from the demo's model, whose
# encoder and features are used again.
# Usage: recipes/ablations.sh [DEMO] [OUT]
set -euo pipefail
demo=${1:-demo}
out=${2:-ablations}
mkdir -p "$out"
[ -d "$out/model" ] || cp -r "$demo/model" "$out/model"

row() {  # name, flags
  local name=$1
  shift
  echo "== $name: $*"
  genius fit "$demo/catalogue" --encoder small --out "$out/model" "$@"
  genius evaluate "$demo/catalogue" --model "$out/model" --pools global --out "$out/$name.evaluation" | tee "$out/$name.txt"
}

row no-contrastive --quantizer.contrastive-weight 0 --quantizer.collapse allow
row no-modality-code --quantizer.level0 none
row no-augmentation --generator.augmentation none
row learned-modality-code --quantizer.level0 learned
row no-alignment --quantizer.alignment-weight 0
row classified-modality-code --quantizer.level0 classifier
row shared-codebook --quantizer.shared-codebook
