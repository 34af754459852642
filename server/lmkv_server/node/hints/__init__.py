"""Hints about prompts: what a node does with its chunks when an engine or an orchestrator asks it to.

`HintExecutor` carries them out on the node's tiers.
"""
