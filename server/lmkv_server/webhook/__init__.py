"""The mutating webhook, by which pods of engines that others create get lmkv's connector and node.

Imports `lmkv_server.http` and `lmkv`, and nothing of the other processes. Start with `injection.inject`: a pod in, a
JSON patch out. `review` wraps it in Kubernetes' AdmissionReview, `app` serves it over HTTPS.
"""
