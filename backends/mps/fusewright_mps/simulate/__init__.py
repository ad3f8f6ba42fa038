"""Simulation of Metal on a CPU: source compiled as C++ against a shim of Metal's standard library, with threads in lock step."""
