"""Disaggregated prefill: request parameters, handoffs, and joining the two engines' answers into one.

Start with `handler.RequestHandler`.
"""
