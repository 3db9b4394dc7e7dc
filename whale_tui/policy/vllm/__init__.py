"""Rollouts from vLLM servers, in processes and environments of their own (docs/vllm.md). Only HTTP here, no torch.

`client` speaks to one server, `managed` runs one, `servers` is the pool that calls are spread over and versions are
proved on, `engine` is the PolicyEngine that joins it with the trainer in the policy worker.
"""
