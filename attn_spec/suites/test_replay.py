"""Replay: what fuzzing has found before, of `--attn-replay` or of the folder attn-finds/ at the root; run first."""

from attn_spec.suites.suite import replays

test_replay = replays()
