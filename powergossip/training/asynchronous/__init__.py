"""Training by exchanges of edges: messages may be late, and workers lost, joined or replaced."""
