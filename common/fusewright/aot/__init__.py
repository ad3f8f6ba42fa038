"""Ahead-of-time compilation: `fusewright.save` writes a compiled model into one file, `fusewright.load` runs it in another
process without tracing or compiling. See docs/warm_starts.md."""
