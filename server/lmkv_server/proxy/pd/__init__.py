"""Serves completion requests, by one engine or by disaggregated prefill (P/D).

Imports `routing`, `response`, `upstream` and below. Start with `handler.RequestHandler`: it has `prefill` compute the
prompt and `decode` send the response. `parameters` has what each engine is asked, `joiner` merges their responses.
"""
