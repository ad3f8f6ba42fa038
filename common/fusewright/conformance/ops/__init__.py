"""C2: sample calls of the opset, and torch's OpInfo database."""
