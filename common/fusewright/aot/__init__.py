"""Programs ahead of time: `fusewright.save` writes what a model was compiled to into one file, `fusewright.load` runs it in another
process without tracing or compiling anything. docs/warm_starts.md leads through it."""
