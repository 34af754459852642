"""The proxy: an OpenAI API in front of prefill and decode engines, or of engines that do both. `docs/proxy.md`."""
