"""Rows of the opset as functions of JAX, by kind."""
