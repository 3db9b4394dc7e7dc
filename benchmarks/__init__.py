"""Ours beside the peer, on the same inputs, in one go."""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # as the policy worker has it, for ours and the peer alike
