"""The compiled extension `_core`, if it was built with a C++ compiler; `fusewright.plan.native` loads it."""
