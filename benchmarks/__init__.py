"""Ours beside the peer, on the same inputs, in one go."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the policy worker has it, for ours and the peer alike
