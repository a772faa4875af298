#!/usr/bin/env bash
# The paper's ablations on the catalogue of `make demo`: each row is one flag away from the demo's model.
# Usage: recipes/ablations.sh [DEMO] [OUT]
set -euo pipefail
demo=${1:-demo}
out=${2:-ablations}

row() {  # name, flags
  local name=$1
  shift
  echo "== $name: $*"
  genius fit "$demo/catalogue" --encoder "small:$demo/model/encoder" --out "$out/$name" "$@"
  genius evaluate "$demo/catalogue" --model "$out/$name" --pools global
}

row full
row no-contrastive --quantizer.contrastive-weight 0
row no-alignment --quantizer.alignment-weight 0
row no-modality-code --quantizer.level0 none
row learned-modality-code --quantizer.level0 learned
row classified-modality-code --quantizer.level0 classifier
row no-augmentation --generator.augmentation none
row shared-codebook --quantizer.shared-codebook
