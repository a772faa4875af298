"""What stands beside our search in every table: dense indexes, routing by geometry, the authors' way."""
