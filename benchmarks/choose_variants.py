"""Write the problems in which variants meet: `attn_spec/suites/variants.yaml` and `variants_three_way.yaml`.

    python benchmarks/choose_variants.py

Takes a minute. Running it twice gives the same files. To be run when a factor of `attn_spec.choice.variants` has
changed; tests/test_variants.py tells when a file is no longer true.
"""

from attn_spec.choice import variants
from attn_spec.choice.chosen import listed

HEADER = """Written by `python benchmarks/choose_variants.py`; not to be edited.

Every {} variants and other features that can stand together do so in one of these problems.
"""


def main() -> None:
    tried = [variants.array(2, seed=seed) for seed in range(6)]
    two = min(tried, key=lambda problems: (len(problems), sum(problem.cost for problem in problems)))
    variants.QUICK.write_text(listed(sorted(two, key=lambda p: (p.cost, str(p))), HEADER.format("two")))
    three = variants.array(3, draws=12_000, starts=2)
    rest = [problem for problem in three if problem not in set(two)]
    variants.THREE_WAY.write_text(listed(rest, HEADER.format("three")))
    print(f"{len(two)} problems of pairs (of {[len(problems) for problems in tried]}), {len(rest)} more of threes")


if __name__ == "__main__":
    main()
