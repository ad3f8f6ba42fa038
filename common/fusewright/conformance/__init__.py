"""The conformance kit: whether a backend is correct, and how much of the opset it lowers.
Run it by `fusewright conformance --backend NAME`.

Levels: C0 contract, C1 fallback, C2 ops, C3 faults, C4 models. Two figures, never added: correct (x of y) and lowered (x of y).
Partners run it as a command, or from pytest (`fusewright.conformance.plugin`).
"""
