"""How fast an attention is, as a ratio to a baseline in the same run; `docs/benchmarking.md` is the manual.

cases      what is timed: a grid in YAML, model presets, scaled to the device
calls      an implementation's calls on rotated inputs, made ready off the clock, and their outputs verified
expected   what the timed calls should give
clock      the seam to the device: CPU, `cuda_clock`, and `simulated` with true times that are known
paired     the engine: randomised ABBA pairs until an interval decides
work       exact FLOP and least bytes, from the mask itself; `roofline` the machine's ceilings
memory     peak above the inputs, and its scaling law
overheads  launches, layout copies and casts of a call
session    all cases, the control, Holm's correction; `tables`, `plots` and `history` show and keep them
"""
