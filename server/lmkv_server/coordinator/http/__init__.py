"""The coordinator's HTTP port: its RPCs as JSON, LMCache's paths, metrics, health, and the web page."""
