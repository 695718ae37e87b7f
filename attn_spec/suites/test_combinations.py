"""Combinations: the problems in which every two, and in `ci` every three, features stand together.

They are data of ours: `python benchmarks/choose_problems.py` chooses them anew.
"""

from attn_spec.choice.chosen import chosen_problems, three_way_problems
from attn_spec.invariants import numerics as law
from attn_spec.suites.suite import tries

test_features_together = tries(law.features_together, chosen_problems(), ci=three_way_problems)
