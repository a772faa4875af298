"""One protocol, few implementations: small, clip, precomputed, text."""
