"""The compiled extension `_core`, if a C++ compiler was there; `fusewright.plan.native` looks for it."""
