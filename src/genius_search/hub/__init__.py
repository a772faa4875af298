"""The Hugging Face hub: reach it or say at once that one cannot, list, fetch with resuming, publish."""
