"""Quantize a model to a graph with quantize and dequantize ops, with torchao's PT2E, and report its accuracy."""
