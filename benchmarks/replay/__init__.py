"""Parts of `eviction`: traces of requests, and eviction policies for comparison."""
