"""From a model to a graph of quantize and dequantize ops, on top of torchao's PT2E; and how accurate that is."""
