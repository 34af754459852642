"""The demo: two engines, a coordinator and the proxy on this machine, started by `lmkv demo`."""
