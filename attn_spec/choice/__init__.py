"""Which problems are tried: every pair of features at least once, and the fewest that catch every fault twice.

features   what a problem has: its dtype, how heads are grouped, how lengths compare, which mask in which shape, ...
covering   arrays in which every pair (or every three) of features stands together somewhere
matrix     the margin of every fault on every problem: its worst error in units of the bound
selection  the fewest problems, given the matrix
chosen     what stands in `attn_spec/suites/chosen.yaml`, written by `benchmarks/choose_problems.py`
"""
