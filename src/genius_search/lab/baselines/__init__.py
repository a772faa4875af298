"""What stands beside our search in every table: dense indexes, nearest code vectors, the authors' way."""
