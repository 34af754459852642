"""Stubs of Envoy's external processing API, made from `protos/envoy`. Imported only by the endpoint picker."""
