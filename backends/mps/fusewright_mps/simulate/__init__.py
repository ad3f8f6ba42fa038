"""Metal source on a CPU: compiled as C++ against a shim of the Metal standard library, run in lock step."""
