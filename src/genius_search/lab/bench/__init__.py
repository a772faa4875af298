"""What search costs, beside its rivals, and how that grows with the pool: every figure by one command."""
