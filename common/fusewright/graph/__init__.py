"""The primitive-op graph: an fx.Graph restricted to the opset plus opaque ATen nodes."""
