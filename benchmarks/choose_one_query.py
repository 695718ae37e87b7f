"""Write the problems of one query: `attn_spec/suites/one_query.yaml` and `one_query_three_way.yaml`.

    python benchmarks/choose_one_query.py

Running it twice gives the same files. To be run when a factor of `attn_spec.choice.decoding` has changed;
tests/test_decoding.py tells when a file is no longer true.
"""

from attn_spec.choice import decoding
from attn_spec.choice.chosen import listed

HEADER = """Written by `python benchmarks/choose_one_query.py`; not to be edited.

Every {} features that one query can meet together do so in one of these problems.
"""


def main() -> None:
    two = min((decoding.array(2, seed=seed, draws=1500, starts=3) for seed in range(4)), key=len)
    decoding.QUICK.write_text(listed(sorted(two, key=lambda p: (p.cost, str(p))), HEADER.format("two")))
    three = decoding.array(3, draws=3000, starts=1)
    rest = [problem for problem in three if problem not in set(two)]
    decoding.THREE_WAY.write_text(listed(rest, HEADER.format("three")))
    print(f"{len(two)} problems of pairs, {len(rest)} more of threes")


if __name__ == "__main__":
    main()
