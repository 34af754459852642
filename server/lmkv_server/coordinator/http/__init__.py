"""The coordinator's HTTP port: its RPCs as JSON, LMCache's paths, metrics, health, and the web page.

May import `services` and what is below. Start with `app.make_app`.
"""
