#!/usr/bin/env bash
# A folder of one's own pictures: index it, look for one of them by picture.
# Usage: recipes/photos.sh MODEL PHOTOS PICTURE [INDEX]
set -euo pipefail
model=$1 photos=$2 picture=$3
index=${4:-photos.index}

genius index create "$index" --model "$model" --pool "$photos" --embeddings fused --no-captions
genius index info "$index"
genius search "$index" --image "$picture" --modality image --rerank embeddings -k 5
