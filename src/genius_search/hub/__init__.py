"""Models and indexes on the Hugging Face hub: folders and repository names, nothing of what they hold."""
