"""Tensors in, tensors out: fusion, quantizer, generator, losses."""
